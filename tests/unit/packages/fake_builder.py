"""A builder of environments that needs neither uv nor a network: it writes small files, as slowly as a test wants."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from executor_server.backends.environments import Target
from executor_server.core import PackagesSpec, Progress
from executor_server.packages import Built, Lock, OnProgress, Places

IMAGE = Target("local", "base", "image-1")


def packages(*requirements: str, max_environment_bytes: int = 2**30) -> PackagesSpec:
    return PackagesSpec(requirements=tuple(sorted(requirements)), max_environment_bytes=max_environment_bytes)


class FakeBuilder:
    """Resolves `name` and `name>=…` to `versions[name]`, or 1.0, and keeps a wheel of each package."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.versions: dict[str, str] = {}
        self.resolved: Counter[PackagesSpec] = Counter()
        self.made: Counter[str] = Counter()
        self.running = 0
        self.most_running = 0
        self.ended: list[str] = []  # the steps that were entered and left, the cancelled ones included
        self.may_resolve = asyncio.Event()
        self.may_make = asyncio.Event()
        self.may_resolve.set()
        self.may_make.set()
        self.fail_resolve: Callable[[], Exception] | None = None
        self.fail_make: Callable[[], Exception] | None = None
        self.file_bytes = 5000

    async def resolve(self, packages: PackagesSpec, target: Target, on_progress: OnProgress) -> Lock:
        self.resolved[packages] += 1
        await self._step("resolve", self.may_resolve, self.fail_resolve)
        names = sorted({requirement.partition(">")[0] for requirement in packages.requirements})
        pins = tuple(f"{name}=={self.versions.get(name, '1.0')}" for name in names)
        text = "".join(f"{pin} --hash=sha256:{'0' * 64}\n" for pin in pins)
        return Lock(text, "cpython-3.12.4", "x86_64-manylinux_2_39", "0.0.0", pins)

    async def make(
        self, lock: Lock, packages: PackagesSpec, target: Target, staging: Path, on_progress: OnProgress
    ) -> Built:
        self.made[lock.environment_id] += 1
        for done, pin in enumerate(lock.pins):
            on_progress(Progress("installing", done, len(lock.pins), "packages"))
            self._install(pin, staging / "site")
        await self._step("make", self.may_make, self.fail_make)
        modules = tuple(pin.partition("=")[0] for pin in lock.pins)
        return Built(modules, lock.pins, self.file_bytes * len(lock.pins))

    def content_of(self, pin: str) -> bytes:
        return (pin.encode() * self.file_bytes)[: self.file_bytes]

    async def _step(self, name: str, may: asyncio.Event, fail: Callable[[], Exception] | None) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await may.wait()
            if fail is not None:
                raise fail()
        finally:
            self.running -= 1
            self.ended.append(name)

    def _install(self, pin: str, site: Path) -> None:
        name = pin.partition("=")[0]
        wheel = self.places.wheels / hashlib.sha256(pin.encode()).hexdigest() / f"{name}.whl"
        wheel.parent.mkdir(exist_ok=True)
        wheel.write_bytes(self.content_of(pin))
        (site / name / "__pycache__").mkdir(parents=True)
        (site / name / "__init__.py").write_bytes(self.content_of(pin))
        (site / name / "data.txt").write_text(pin)
        (site / name / "__pycache__/__init__.cpython-312.pyc").write_bytes(b"bytecode of " + pin.encode())
