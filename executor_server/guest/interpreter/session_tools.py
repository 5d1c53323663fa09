"""The session's tools as agent code finds them: among its builtins, each by its name.

A program that reuses the name hides the tool, until tools are registered again.
"""

from __future__ import annotations

from ..wire import link
from ..wire.lean import dumps, loads
from ..wire.messages import MAX_NAME_CHARS
from .shipped import ShippedTools, ToolsRefused, Unmade

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any, Callable, Union

    from ..checks.restricted import Builtins

    Stub = Callable[[str, str, list[str], bool], Callable[..., Any]]
    """Makes the stub of a host tool from name, description, parameters, and whether it is the final answer."""


class SessionTools:
    """Puts tools in place as the supervisor's messages "tools", "part", "ship" and "drop" say."""

    def __init__(self, stub: Stub, guarded: Callable[..., Any], builtins: Builtins, main: types.ModuleType) -> None:
        """`guarded` calls a function with arguments and bounds the agent code that this runs."""
        self._stub = stub
        self._builtins = builtins
        self._main = main
        self._shipped = ShippedTools(guarded)
        self._placed: dict[str, Any] = {}

    def on_tools(self, message: link.Message) -> None:
        """Puts tools in place none of which is made here: stubs, and tools that are missing for a reason."""
        stubs, _ = self._stubs(message)
        self._shipped.clear(stubs)
        self._place(stubs)

    def take_part(self, message: link.Message, data: Union[bytes, memoryview]) -> None:
        """Takes a part of a tool that will be made."""
        self._shipped.take_part(message.head.text("tool", MAX_NAME_CHARS), message.head.text("part", 32), data)

    def make(self, message: link.Message) -> tuple[dict[str, Any], bytes]:
        """Makes tools from the parts that came before and puts all in place. Returns the answer to the supervisor."""
        stubs, shipped = self._stubs(message)
        problems = ""
        try:
            if message.head.boolean("again"):
                made, problems = self._shipped.replace_again(shipped, stubs)
            else:
                made = self._shipped.replace(shipped, stubs)
        except ToolsRefused as refused:
            head = {"t": "op_done", "ok": False, "message": str(refused)[: link.MAX_MESSAGE_CHARS]}
            return head, dumps(refused.modules)
        self._place({**stubs, **made})
        return {"t": "op_done", "ok": True, "message": problems[: link.MAX_MESSAGE_CHARS]}, b""

    def on_drop(self, message: link.Message) -> None:
        """Replaces tools by ones that say why they are not there any more."""
        dropped = {name: Unmade(name, why) for name, why in loads(link.read_body(message)).items()}
        self._shipped.drop(dropped)
        self._placed.update(dropped)
        self._builtins.add(self._placed)

    def _stubs(self, message: link.Message) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns the tools that are not made here, and the specs of the others."""
        stubs: dict[str, Any] = {}
        others = []
        for spec in loads(link.read_body(message)):
            name = spec["name"]
            if "why_not" in spec:
                stubs[name] = Unmade(name, spec["why_not"])
            elif "modules" in spec:
                others.append(spec)
            else:
                stubs[name] = self._stub(name, spec["description"], spec["parameters"], spec["final"])
        return stubs, others

    def _place(self, tools: dict[str, Any]) -> None:
        self._placed = tools
        self._builtins.add(tools)
        for name in tools:
            self._main.__dict__.pop(name, None)
