"""The session's tools as agent code finds them: among its builtins, each by its name.

A program that reuses the name hides the tool, until tools are registered again.
"""

from __future__ import annotations

from executor_api.limits import TOOLS_MAX

from ..wire import link
from ..wire.lean import dumps
from ..wire.link_messages import (
    MAX_ANSWER_CHARS,
    Answered,
    DropTools,
    PlacedTool,
    PlaceTools,
    ShipTools,
    ToolPart,
    placed_tools,
)
from ..wire.messages import MAX_NAME_CHARS
from ..wire.schema import read_texts
from .shipped import ShippedTools, ToolsRefused, Unmade

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any, Callable, Union

    from ..checks.agent_builtins import Builtins

    Stub = Callable[[str, str, list[str], bool], Callable[..., Any]]
    """Makes the stub of a host tool from name, description, parameters, and whether it is the final answer."""


class SessionTools:
    """Puts tools in place as the supervisor's messages say."""

    def __init__(self, stub: Stub, guarded: Callable[..., Any], builtins: Builtins, main: types.ModuleType) -> None:
        """`guarded` calls a function with arguments and bounds the agent code that this runs."""
        self._stub = stub
        self._builtins = builtins
        self._main = main
        self._shipped = ShippedTools(guarded)
        self._placed: dict[str, Any] = {}

    def on_tools(self, _message: PlaceTools, packet: link.Packet) -> None:
        """Places tools that need no making: stubs, and tools that are missing for a reason."""
        stubs, _ = self._stubs(packet)
        self._shipped.clear(stubs)
        self._place(stubs)

    def take_part(self, part: ToolPart, data: Union[bytes, memoryview]) -> None:
        """Takes a part of a shipped tool."""
        self._shipped.take_part(part.tool, part.part, data)

    def make(self, ship: ShipTools, packet: link.Packet) -> tuple[Answered, bytes]:
        """Makes tools from the received parts and places all of them. Returns the answer to the supervisor."""
        stubs, shipped = self._stubs(packet)
        try:
            made, problems = self._shipped.replace(shipped, stubs, again=ship.again)
        except ToolsRefused as refused:
            return Answered(ok=False, message=str(refused)[:MAX_ANSWER_CHARS]), dumps(refused.modules)
        self._place({**stubs, **made})
        return Answered(ok=True, message=problems[:MAX_ANSWER_CHARS]), b""

    def on_drop(self, drop: DropTools, packet: link.Packet) -> None:
        """Replaces tools by stand-ins that say why they are gone."""
        names = read_texts(link.read_body(packet), TOOLS_MAX, MAX_NAME_CHARS, "tools")
        dropped = {name: Unmade(name, drop.why_not) for name in names}
        self._shipped.drop(dropped)
        self._placed.update(dropped)
        self._builtins.add(self._placed)

    def _stubs(self, packet: link.Packet) -> tuple[dict[str, Any], list[PlacedTool]]:
        """Returns the tools that are not made here, and the descriptions of the others."""
        stubs: dict[str, Any] = {}
        others = []
        for tool in placed_tools(link.read_body(packet)):
            if tool.why_not is not None:
                stubs[tool.name] = Unmade(tool.name, tool.why_not)
            elif tool.modules is not None:
                others.append(tool)
            else:
                stubs[tool.name] = self._stub(tool.name, tool.description, tool.parameters, tool.final)
        return stubs, others

    def _place(self, tools: dict[str, Any]) -> None:
        self._placed = tools
        self._builtins.add(tools)
        for name in tools:
            self._main.__dict__.pop(name, None)
