"""The watches of a sandbox, which most never have: what they need is imported with the first one."""

from __future__ import annotations

import math

from ..wire.file_changes import NextChanges, UnwatchFiles, WatchFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Union

    from ..wire.channel import Channel
    from ..wire.loop import Loop
    from .watches import Watches

REQUESTS = (WatchFiles, NextChanges, UnwatchFiles)


class WatchesOnDemand:
    """Passes on to `Watches`, once there is one."""

    def __init__(self, channel: Channel, loop: Loop, root: str) -> None:
        self._made_with = channel, loop, root
        self._watches: Optional[Watches] = None

    @property
    def due(self) -> float:
        return math.inf if self._watches is None else self._watches.due

    def take(self, request: Union[WatchFiles, NextChanges, UnwatchFiles]) -> None:
        if self._watches is None:
            from .watches import Watches  # it imports ctypes

            self._watches = Watches(*self._made_with)
        self._watches.take(request)

    def on_time(self, now: float) -> None:
        if self._watches is not None:
            self._watches.on_time(now)

    def end_all(self) -> None:
        if self._watches is not None:
            self._watches.end_all()

    def close_all(self) -> None:
        if self._watches is not None:
            self._watches.close_all()
