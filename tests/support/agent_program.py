"""Runs a program as the sandbox does, checked, instrumented and metered, but in this process. Standard library only."""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Sequence
from typing import Any, NamedTuple

from executor_server.guest.checker import CO_COROUTINE, check
from executor_server.guest.dynamic import agent_builtins
from executor_server.guest.guard import guard
from executor_server.guest.hooks import Hooks
from executor_server.guest.instrument import TRAILING_EXPRESSION, LastValue, Sentinels, bind
from executor_server.guest.meter import Meter
from executor_server.guest.referee import Referee
from executor_server.guest.restricted import Builtins
from executor_server.guest.rules import Rules

SENTINELS = Sentinels.of("5f3c")
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
        self.referee = Referee(self.meter)
        self.referee.rules = Rules(authorized, denied, refused)
        self.hooks = Hooks(self.referee)
        self.builtins = agent_builtins(
            referee=self.referee,
            meter=self.meter,
            guard=guard,
            sentinels=SENTINELS,
            hooks=self.hooks,
            imported=lambda _: None,
        )
        self._restricted = Builtins(self.builtins, self.referee, self.hooks)
        self._restricted.on_rules()
        self.namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": self.builtins}
        self.executions = 0

    def hold_to(self, rules: Rules) -> None:
        self.referee.rules = rules
        self._restricted.on_rules()

    def run(self, source: str, budget: int = BUDGET, output_mode: str = TRAILING_EXPRESSION) -> Ended:
        self.executions += 1
        verdict = check(
            source,
            f"<execution-{self.executions}>",
            rules=self.referee.rules,
            output_mode=output_mode,
            sentinels=SENTINELS,
        )
        assert verdict.code is not None, verdict.error
        last = LastValue()
        code = marshal.loads(verdict.code)[0]
        code = bind(code, SENTINELS.constants(ticks=self.meter.ticks, guard=guard, keep=last, hooks=self.hooks))
        error: BaseException | None = None
        self.meter.start(budget)
        self.referee.begin()
        try:
            result = eval(code, self.namespace)
            if code.co_flags & CO_COROUTINE:
                asyncio.run(result)
        except BaseException as caught:  # noqa: BLE001 (the border of agent code)
            error = caught
        finally:
            self.referee.end()
            operations = self.meter.finish()
        return Ended(last.value, error, operations, self.meter.exceeded)


def run(source: str, budget: int = BUDGET, output_mode: str = TRAILING_EXPRESSION) -> Ended:
    return Agent().run(source, budget, output_mode)
