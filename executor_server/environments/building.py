"""The seam between the service of environments and the builder, which knows uv, locks and workshops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from executor_server.backends import Target
from executor_server.core import PackagesSpec, Progress
from executor_server.environments.file_list import Digest

OnProgress = Callable[[Progress], None]
"""Called in the event loop; must neither block nor raise."""

_ID_CHARS = 32  # 128 bits of a hash: two locks with one id can't be found


@dataclass(frozen=True)
class Lock:
    """All that decides an environment's content, in a canonical form: equal requests give equal locks."""

    text: str  # requirements, one a line, sorted: `name==version` with markers and hashes
    interpreter: str  # its tag, such as "cpython-3.12.4"
    platform: str  # the one that the wheels are for, such as "x86_64-manylinux_2_39"
    uv_version: str
    pins: tuple[str, ...]  # sorted; `name==version` of each line

    @property
    def sha256(self) -> str:
        """The digest of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def environment_id(self) -> str:
        """The name of the environment that is made of it."""
        made_of = [self.interpreter, self.platform, self.uv_version, self.text]
        return "env-" + hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:_ID_CHARS]


@dataclass(frozen=True)
class Built:
    """An environment that was made and checked, and is not published yet."""

    modules: tuple[str, ...]  # top-level modules that it has, sorted
    pins: tuple[str, ...]  # sorted; `name==version` of each distribution that it has
    size_bytes: int
    digests: Mapping[str, Digest] = field(default_factory=dict, repr=False)  # by the paths of files


class Builder(Protocol):
    """Makes environments. It is called for one environment at a time each, for several at once.

    Both methods raise EnvironmentFailed when asking again for the same packages is of no use; ImageNotReady, with the
    seconds until another attempt, for what may pass (the index does not answer); their texts go to the client. For
    everything else they raise SandboxFailure or OSError, whose texts are logged. When one is cancelled, its workshop
    has gone before it returns.
    """

    async def resolve(self, packages: PackagesSpec, target: Target, on_progress: OnProgress) -> Lock:
        """Returns the lock of these packages for this image."""
        ...

    async def make(
        self, lock: Lock, packages: PackagesSpec, target: Target, staging: Path, on_progress: OnProgress
    ) -> Built:
        """Makes the environment of this lock in `staging`: its packages in `site` there, with their bytecode.

        `staging` is an empty directory of the daemon's user (places.py) that no workshop can write to: what was made in
        `Places.work`, where hard links into the cache are possible, is moved there, and checked after that. All that
        is left in it becomes the environment. The caller removes it when this raises. It may raise FilesDamaged, too
        (recorded.py): when what it names has been removed from the cache, another attempt may succeed.
        """
        ...
