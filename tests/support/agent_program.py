"""Runs a program as the sandbox does, checked, instrumented and metered, but in this process. Standard library only."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import marshal
from collections.abc import Sequence
from typing import Any, NamedTuple

from executor_server.guest.checks.agent_builtins import Builtins
from executor_server.guest.checks.checker import check
from executor_server.guest.checks.instrumentation import TRAILING_EXPRESSION
from executor_server.guest.checks.meter import Meter
from executor_server.guest.checks.rules import RuleEnforcer, Rules
from executor_server.guest.checks.sentinels import LastValue, Sentinels, bind

SENTINELS = Sentinels("5f3c")
BUDGET = 10_000


class Ended(NamedTuple):
    value: Any
    error: BaseException | None
    operations: int
    exceeded: bool


class Agent:
    """An interpreter's namespace and meter, over several executions."""

    def __init__(
        self, authorized: Sequence[str] = ("*",), denied: Sequence[str] = (), refused: Sequence[str] = ()
    ) -> None:
        self.meter = Meter()
        self.enforcer = RuleEnforcer(self.meter)
        self.enforcer.rules = Rules(authorized, denied, refused)
        self._builtins = Builtins(dict(vars(builtins)), self.enforcer, self.meter, SENTINELS)
        self.builtins, self.hooks = self._builtins.names, self._builtins.hooks
        self._builtins.on_rules()
        self.namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": self.builtins}
        self.executions = 0

    def hold_to(self, rules: Rules) -> None:
        self.enforcer.rules = rules
        self._builtins.on_rules()

    def run(self, source: str, budget: int = BUDGET, output_mode: str = TRAILING_EXPRESSION) -> Ended:
        self.executions += 1
        verdict = check(
            source,
            f"<execution-{self.executions}>",
            rules=self.enforcer.rules,
            output_mode=output_mode,
            sentinels=SENTINELS,
        )
        assert verdict.code is not None, verdict.error
        last = LastValue()
        code = marshal.loads(verdict.code)[0]
        code = bind(code, SENTINELS.constants(self.meter.ticks, self.hooks, last))
        error: BaseException | None = None
        self.meter.start(budget)
        self.enforcer.begin()
        try:
            result = eval(code, self.namespace)
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(result)
        except BaseException as caught:  # noqa: BLE001 (the border of agent code)
            error = caught
        finally:
            self.enforcer.end()
            operations = self.meter.finish()
        return Ended(last.value, error, operations, self.meter.exceeded)


def run(source: str, budget: int = BUDGET, output_mode: str = TRAILING_EXPRESSION) -> Ended:
    return Agent().run(source, budget, output_mode)
