"""The runtime of agent code: its namespace and builtins, its meter, and its rules."""

from __future__ import annotations

import builtins
import marshal
import sys
import types

from ..checks.agent_builtins import Builtins
from ..checks.import_system import ImportFunctions, guard_loaders
from ..checks.meter import Meter
from ..checks.own_modules import OwnModules
from ..checks.rules import RuleEnforcer
from ..checks.sentinels import LastValue, Sentinels, bind
from ..wire.paths import GUEST_PATH
from . import display
from .audit import Audit
from .library_changes import adapt, heed_proxy
from .notebook import Notebook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ..checks.rules import Rules
    from ..state.world import World

# Operations that encoding or decoding one variable may spend in agent code, outside of executions.
_OPERATION_BUDGET = 10**8


class Runtime:
    """Owns `__main__` and everything that instrumented code calls."""

    def __init__(self, config: Any) -> None:
        self.memory_bytes: int = config.memory_bytes
        self._has_network: bool = config.egress_listener is not None
        self.meter = Meter()
        self._sentinels = Sentinels(config.mark)
        own = OwnModules(GUEST_PATH, Notebook)
        self.enforcer = RuleEnforcer(self.meter, own)
        self.names: dict[str, Any] = {**vars(builtins), "display": display.display}
        self.notebook = Notebook(self.names, self.enforcer)
        self.builtins = Builtins(self.names, self.enforcer, self.meter, self._sentinels, self._on_import)
        self.audit = Audit(self.names, self.enforcer, config.workspace)
        self.main = types.ModuleType("__main__")
        sys.modules["__main__"] = self.main
        self._import_functions = ImportFunctions(self.names, self.enforcer)
        guard_loaders(own, self.enforcer, self.names, self.builtins.make_module_code)
        self._constants = dict(self.builtins.constants)
        # Captured: agent code may replace these names in their modules.
        self._loads, self._bind = marshal.loads, bind

    def _on_import(self, module: str) -> None:
        self._import_functions.guard(module)
        adapt(module)
        display.show_windows()
        if self._has_network:
            heed_proxy()

    def set_rules(self, rules: Rules) -> None:
        self.enforcer.rules = rules
        self.builtins.on_rules()
        self.audit.on_rules()

    def load(self, packed: bytes, last: LastValue) -> tuple[types.CodeType, list[list[int]], bool]:
        """Returns the checker's code, bound to this runtime, the lines of its statements, and if it may need a loop."""
        code, spans, names = self._loads(packed)
        self._constants[self._sentinels.keep] = last.keep
        bound = self._bind(code, self._constants)
        self._constants[self._sentinels.keep] = None  # else the last value would outlive its run
        return bound, spans, not names or self._has_asyncio(names)

    def _has_asyncio(self, names: list[str]) -> bool:
        """True if a global of one of these names is asyncio's."""
        asyncio, namespace = sys.modules.get("asyncio"), self.main.__dict__
        return any(name in namespace and namespace[name] is getattr(asyncio, name, None) for name in names)

    def guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that may run agent code outside of an execution, within a budget of operations."""
        self.meter.start(_OPERATION_BUDGET)
        try:
            return function(*args)
        finally:
            self.meter.finish()

    def world(self) -> World:
        from ..state.world import World

        return World(self.main, self.builtins, self.meter.ticks, self.memory_bytes)
