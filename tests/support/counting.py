"""Runs generated programs counted as the interpreter counts and counted in the plainest way; prints the differences.

The plain way puts a call of a Python function at the head of every loop body, comprehension clause and function. The
programs note what they do in `log`, so that the order of all effects is compared too: when an iterator is made, each
element that it gives, what ends it. A script of its own, for each CPython at hand.
"""

from __future__ import annotations

import ast
import gc
import json
import random
import sys
from typing import Any

from executor_server.guest.checks.meter import OperationLimitExceeded
from tests.support.agent_program import Agent
from tests.support.rounds import rounds

PROGRAMS = rounds(80, 20)
BUDGET = 100_000

_PRELUDE = """
import asyncio
log = []
note = log.append
class Numbers:
    def __init__(self, count, fails=False):
        self.count, self.fails, self.at = count, fails, 0
    def __iter__(self):
        note(('iter', self.count))
        return self
    def __next__(self):
        self.at += 1
        note(('next', self.at))
        if self.at > self.count:
            if self.fails:
                raise ValueError('at its end')
            raise StopIteration
        return self.at
class Ticker:
    def __init__(self, count):
        self.count, self.at = count, 0
    def __aiter__(self):
        note(('aiter', self.count))
        return self
    async def __anext__(self):
        await asyncio.sleep(0)
        self.at += 1
        if self.at > self.count:
            raise StopAsyncIteration
        return self.at
def numbers(count):
    note(('begin', count))
    try:
        for each in range(count):
            yield each
    finally:
        note(('closed', count))
def failing(value):
    if value > 2:
        raise (StopIteration if value % 2 else KeyError)(value)
    return value
shared = iter(range(9))
growing = [1, 2]
odd = [(1, 2), 3]
class Place:
    pass
place = Place()
"""


class Writer:
    """Writes one random program, which always ends."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = 0

    def program(self) -> str:
        lines = self._block(0, in_loop=False)
        body = "\n".join(f"    {line}" for line in self._block(0, in_loop=False, is_async=True))
        return _PRELUDE + "\n".join([*lines, "async def main():", body, "asyncio.run(main())", "note(sorted(growing))"])

    def _pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _iterable(self) -> str:
        few = self._random.randrange(5)
        return str(
            self._pick(
                *(f"range({few})", "range(20)", f"numbers({few})", f"Numbers({few})", f"Numbers({few}, fails=True)"),
                *("shared", "(4, 5, 6)", "[7, 8]", "'text'", "{1: 2, 3: 4}", "iter([1, 2, 3])", "()", "5", "None"),
                *(f"(each for each in Numbers({few}))", f"map(failing, range({few}))", "list(range(15))"),
            )
        )

    def _element(self, name: str) -> str:
        return str(self._pick(name, f"({name}, 1)", f"note({name})", f"failing({name})", f"[{name} for _ in '12']"))

    def _clauses(self, name: str, *, is_async: bool) -> str:
        clauses = f"for {name} in {self._iterable()}"
        if is_async and self._pick(True, False):
            clauses = f"async for {name} in Ticker({self._random.randrange(4)})"
        elif self._pick(True, False, False):
            clauses = f"for {name}, {self._name()} in {self._pick('[(1, 2), (3, 4)]', 'odd', 'enumerate(numbers(3))')}"
        for _ in range(self._random.randrange(3)):
            clauses += str(
                self._pick(
                    f" if {name}", f" for {self._name()} in {self._iterable()}", f" for {self._name()} in [{name}] if 1"
                )
            )
        return clauses

    def _comprehension(self, *, is_async: bool = False) -> str:
        name = self._name()
        clauses, element = self._clauses(name, is_async=is_async), self._element(name)
        if is_async:
            return f"[{element} {clauses}]"
        taken = f"next(({element} {clauses}), None)"
        return str(
            self._pick(
                f"[{element} {clauses}]",
                f"{{str({element}) {clauses}}}",
                f"{{{name}: {element} {clauses}}}",
                f"list({element} {clauses})",
                f"sum(1 {clauses})",
                f"any({element} {clauses})",
                taken,
            )
        )

    def _block(self, depth: int, *, in_loop: bool, is_async: bool = False) -> list[str]:
        lines: list[str] = []
        for _ in range(self._random.randrange(1, 4)):
            lines += self._guarded(self._statement(depth, in_loop=in_loop, is_async=is_async))
        return lines

    def _guarded(self, lines: list[str]) -> list[str]:
        if self._pick(True, True, False):
            inside = [f"    {line}" for line in lines]
            handler = ["except (TypeError, ValueError, KeyError, StopIteration, RuntimeError) as error:"]
            ending = self._pick([], ["finally:", "    note('finally')"])
            return ["try:", *inside, *handler, "    note(type(error).__name__)", *ending]
        return lines

    def _statement(self, depth: int, *, in_loop: bool, is_async: bool) -> list[str]:
        name = self._name()
        kinds = ["comprehension", "function", "generator", "lambda"]
        if depth < 3:
            kinds += ["for", "for", "for", "while"]
        if in_loop:
            kinds += ["leave"]
        kind = self._pick(*kinds)
        if kind == "for":
            return self._for(depth, name, in_loop=in_loop, is_async=is_async)
        if kind == "while":
            body = self._indented(depth, is_async=is_async)
            return [f"{name} = 3", f"while {name}:", f"    {name} -= 1", *body]
        if kind == "leave":
            return [
                f"if log and len(log) % {self._random.randrange(2, 5)} == 0:",
                f"    {self._pick('break', 'continue')}",
            ]
        if kind == "function":
            body = [f"    {line}" for line in self._block(depth + 2, in_loop=False)]
            return [f"def {name}(value=3):", "    note(value)", *body, f"note({name}())"]
        if kind == "generator":
            taken = self._random.randrange(4)
            return [
                f"{name} = ({self._element('each')} for each in {self._iterable()})",
                f"note([next({name}, None) for _ in range({taken})])",
                self._pick(f"{name}.close()", f"note(list({name}))", f"del {name}"),
            ]
        if kind == "lambda":
            return [f"note(sorted([3, 1, 2], key=lambda value: {self._pick('-value', 'failing(value)')}))"]
        return [f"note({self._comprehension(is_async=is_async)})"]

    def _for(self, depth: int, name: str, *, in_loop: bool, is_async: bool) -> list[str]:
        if is_async and self._pick(True, False):
            head = f"async for {name} in Ticker({self._random.randrange(4)}):"
        elif self._pick(True, False, False):
            pairs = self._pick("odd", "enumerate('ab')")
            head = f"for {name}, {self._pick('place.at', 'log[-1:]', self._name())} in {pairs}:"
        else:
            head = f"for {name} in {self._iterable()}:"
        grows = [f"    if len(growing) < 6: growing.append({self._random.randrange(9)})"]
        if self._pick(True, False, False):
            head = f"for {name} in growing:"
        body = self._indented(depth, is_async=is_async)
        last = self._pick([], ["else:", "    note('else')"])
        return [head, f"    note(({name!r}, repr({name})))", *(grows if "growing" in head else []), *body, *last]

    def _indented(self, depth: int, *, is_async: bool) -> list[str]:
        return [f"    {line}" for line in self._block(depth + 1, in_loop=True, is_async=is_async)]


_TAKEN = ast.Name(id="_taken", ctx=ast.Load())


class Ticking(ast.NodeTransformer):
    """Inserts calls of `_tick`: right after an element is taken in a `for` and in the first clause of a comprehension."""

    def _tick(self) -> Any:
        return ast.Call(func=ast.Name(id="_tick", ctx=ast.Load()), args=[], keywords=[])

    def _head(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(value=self._tick()))
        return node

    visit_AsyncFor = visit_While = visit_FunctionDef = visit_AsyncFunctionDef = _head

    def visit_For(self, node: Any) -> Any:
        if not isinstance(node.target, ast.Name):
            node.body.insert(0, ast.Assign(targets=[node.target], value=_TAKEN))
            node.target = ast.Name(id=_TAKEN.id, ctx=ast.Store())
        return self._head(node)

    def visit_Lambda(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body = ast.BoolOp(op=ast.And(), values=[self._tick(), node.body])
        return node

    def _clauses(self, node: Any) -> Any:
        self.generic_visit(node)
        first = node.generators[0]
        for clause in node.generators:
            clause.ifs.insert(0, self._tick())
        if not (first.is_async or isinstance(first.target, ast.Name)):
            taken = ast.comprehension(
                target=ast.Name(id=_TAKEN.id, ctx=ast.Store()), iter=first.iter, ifs=first.ifs[:1], is_async=0
            )
            first.iter, first.ifs = ast.List(elts=[_TAKEN], ctx=ast.Load()), first.ifs[1:]
            node.generators.insert(0, taken)
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _clauses


def plainly(source: str, budget: int) -> list[Any]:
    """Returns how the program ended, its operations, and its log."""
    spent = 0

    def tick() -> bool:
        nonlocal spent
        if spent == budget:
            raise OperationLimitExceeded(budget)
        spent += 1
        return True

    tree = ast.fix_missing_locations(Ticking().visit(ast.parse(source)))
    namespace: dict[str, Any] = {"__name__": "__main__", "_tick": tick}
    error = ""
    try:
        exec(compile(tree, "<plain>", "exec", dont_inherit=True), namespace)
    except BaseException as caught:  # noqa: BLE001 (the border of the programs)
        error = type(caught).__name__
    gc.collect()
    return [error, spent, repr(namespace.get("log"))]


def instrumented(source: str, budget: int) -> list[Any]:
    agent = Agent(refused=("foreign_modules",))
    ended = agent.run(source, budget)
    error, operations = "" if ended.error is None else type(ended.error).__name__, ended.operations
    del ended  # its traceback holds the frames of generators, which close with it
    gc.collect()
    return [error, operations, repr(agent.namespace.get("log"))]


def main() -> None:
    sys.unraisablehook = lambda _: None  # the budget ends finalizers, too
    gc.freeze()  # modules are no garbage of a program's
    ran, differences, exceeded = 0, [], 0
    for seed in range(PROGRAMS):
        source = Writer(seed).program()
        whole = plainly(source, BUDGET)
        counts = random.Random(seed)
        budgets = {BUDGET, *(counts.randrange(whole[1] + 1) for _ in range(3))}
        for budget in sorted(budgets):
            expected, got = whole if budget == BUDGET else plainly(source, budget), instrumented(source, budget)
            ran += 1
            exceeded += expected[0] == "OperationLimitExceeded"
            if expected != got:
                differences.append([seed, budget, expected, got])
    sys.stdout.write(
        json.dumps({"programs": PROGRAMS, "ran": ran, "exceeded": exceeded, "differences": differences[:3]})
    )


if __name__ == "__main__":
    main()
