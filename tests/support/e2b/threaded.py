"""The double in a thread with an event loop of its own, for code that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.e2b.faults import Fault, Kind, Request, Storm
from tests.support.e2b.server import Double, DoubleSandbox

CALL_TIMEOUT_S = 60.0

T = TypeVar("T")


class ThreadedDouble:
    """The same as `Double`, for `with`; each method runs in the double's own thread."""

    def __init__(self, **settings: Any) -> None:
        self._double = Double(**settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="double")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._double.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._run(self._double.close())
        finally:
            self._stop()

    @property
    def url(self) -> str:
        return self._double.url

    @property
    def api_key(self) -> str:
        return self._double.api_key

    @property
    def api_key_file(self) -> Path:
        return self._double.api_key_file

    @property
    def environment(self) -> dict[str, str]:
        return self._double.environment

    @property
    def sandboxes(self) -> dict[str, DoubleSandbox]:
        return dict(self._double.sandboxes)

    @property
    def requests(self) -> list[Request]:
        return list(self._double.requests)

    def fault(self, kind: Kind, path: str = "*", **settings: Any) -> Fault:
        rule: Fault = self._call(lambda: self._double.fault(kind, path, **settings))
        return rule

    def storm(self, seed: int, *, rate: float, **settings: Any) -> Storm:
        storm: Storm = self._call(lambda: self._double.storm(seed, rate=rate, **settings))
        return storm

    def clear_faults(self) -> None:
        self._call(self._double.clear_faults)

    def advance(self, seconds: float) -> None:
        self._call(lambda: self._double.advance(seconds))

    def go_down(self) -> None:
        self._call(self._double.go_down)

    def go_down_for(self, seconds: float) -> None:
        self._call(lambda: self._double.go_down_for(seconds))

    def come_up(self) -> None:
        self._call(self._double.come_up)

    def cut_all(self) -> None:
        self._call(self._double.cut_all)

    def vanish(self, sandbox_id: str) -> None:
        self._run(self._double.vanish(sandbox_id))

    def _call(self, function: Any) -> Any:
        async def called() -> Any:
            return function()

        return self._run(called())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
