"""The gain when the pool's sandboxes have imported the libraries of an image in advance."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.bench import Bench, Served, serving
from benchmarks.figures import Figure, Reference, timed
from benchmarks.references import require_docker_image

_IMAGE = "remote-executor/data"
_ROUNDS = 10
# Long enough for a container to be made and to import pandas.
_REFILL_S = 3.0
_SETTINGS = f"""
[docker.images]
plain = "{_IMAGE}"
ahead = {{ reference = "{_IMAGE}", preload = ["pandas"] }}

[[pool.warm]]
image = "plain"
size = 1

[[pool.warm]]
image = "ahead"
size = 1
"""


def pandas(bench: Bench) -> Iterator[Figure]:
    """The first `import pandas` of warm sessions, with and without `preload`."""
    require_docker_image(_IMAGE)
    with serving("docker", _SETTINGS) as served:
        ahead_ms, plain_ms = bench.in_turns(
            _ROUNDS, lambda: _first_import(served, "ahead"), lambda: _first_import(served, "plain"), warm_up=1
        )
    yield Figure("first import pandas, preloaded", "ms", ahead_ms, Reference("not preloaded", plain_ms))


def _first_import(served: Served, image: str) -> float:
    while True:
        time.sleep(_REFILL_S / 2)  # the other kind has as long while this one waits
        with served.client.create_session(image=image, authorized_imports=["pandas"]) as session:
            took_ms = timed(lambda: session.execute("import pandas"))
            if session.info.warm:
                return took_ms
