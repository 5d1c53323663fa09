"""The runtime of agent code: its namespace and builtins, the meter that counts it, and the rules that hold for it."""

from __future__ import annotations

import marshal
import sys
import types
from itertools import compress

from ..checks.dynamic import Instrumenter, agent_builtins
from ..checks.hooks import Hooks
from ..checks.import_functions import ImportFunctions
from ..checks.instrumentation import LastValue, Sentinels, bind
from ..checks.meter import Meter
from ..checks.own_loaders import OwnModules
from ..checks.restricted import Builtins
from ..checks.rule_enforcer import RuleEnforcer
from ..wire.paths import GUEST_PATH
from . import display
from .audit import Audit
from .guard import guard
from .main_module import adapt
from .notebook import Notebook
from .proxy import heed_proxy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ..checks.rules import Rules
    from ..state.world import World

# Operations that encoding or decoding one variable may spend in agent code, outside of executions.
_OPERATION_BUDGET = 10**8


class Runtime:
    """Owns `__main__` and all that instrumented code calls."""

    def __init__(self, config: Any) -> None:
        self.memory_bytes: int = config.memory_bytes
        self._has_network: bool = config.egress_listener is not None
        self.meter = Meter()
        self._sentinels = Sentinels(config.mark)
        self.enforcer = RuleEnforcer(self.meter)
        self.main = types.ModuleType("__main__")
        self._hooks = Hooks(self.enforcer)
        self.names: dict[str, Any] = agent_builtins(
            enforcer=self.enforcer,
            meter=self.meter,
            guard=guard,
            sentinels=self._sentinels,
            hooks=self._hooks,
            imported=self._on_import,
        )
        self.names["display"] = display.display
        self.notebook = Notebook(self.names, self.enforcer)
        self.builtins = Builtins(self.names, self.enforcer, self._hooks)
        self.audit = Audit(self.names, self.enforcer, config.workspace)
        sys.modules["__main__"] = self.main
        self._import_functions = ImportFunctions(self.names, self.enforcer)
        self._constants = self._sentinels.constants(ticks=self.meter.ticks, guard=guard, hooks=self._hooks)
        make_code = Instrumenter(self.enforcer, self._sentinels, self._constants).of_module
        self.enforcer.own = OwnModules(self.names, self.enforcer, make_code, GUEST_PATH, self.notebook)
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

    def load(self, packed: bytes, last: LastValue) -> tuple[types.CodeType, list[list[int]]]:
        """Returns the checker's code, bound to this runtime, and the lines of its statements."""
        code, spans = self._loads(packed)
        self._constants[self._sentinels.keep] = last.keep
        bound = self._bind(code, self._constants)
        self._constants[self._sentinels.keep] = None  # else the value would outlive its run
        return bound, spans

    def guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that may run agent code outside of an execution, within a budget of operations."""
        self.meter.start(_OPERATION_BUDGET)
        try:
            return function(*args)
        finally:
            self.meter.finish()

    def world(self) -> World:
        from ..state.world import World

        constants = {"ticks": self.meter.ticks, "guard": guard, "next": next, "compress": compress}
        return World(self.main, self.names, self.enforcer, self._hooks, constants, self.memory_bytes)
