"""A session that executes, takes savepoints, goes back, tries code, dies and is found again is always what its model is.

The model has what may be seen: some variables, the files of the workspace, and the numbers of savepoints and branches.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from executor_client import ExecutionResult, ExecutorClient, NotFoundError, Outcome, Session, VariablesState
from tests.support.daemon import Daemon, running_daemon
from tests.support.rounds import rounds

NAMES, FILES = ("a", "b", "c"), ("p", "q", "d/r")
KEPT_MAX = 8  # savepoints, and branches, by default of the policy
LOOK = f"""
import os
_files = {{f: open(f).read() for f in {FILES!r} if os.path.exists(f)}}
({{n: globals()[n] for n in {NAMES!r} if n in globals()}}, _files)
"""
DEATHS = {
    "import os; os._exit(7)": Outcome.EXITED,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": Outcome.CRASHED,
}


@dataclass
class State:
    """The variables and files that a session has."""

    variables: dict[str, list[int]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def seen(self) -> tuple[dict[str, list[int]], dict[str, str]]:
        return self.variables, self.files


@dataclass(frozen=True)
class Step:
    """One thing that a program does. It says so as code, and does it to a state."""

    what: str
    name: str
    number: int

    @property
    def code(self) -> str:
        return {
            "bind": f"{self.name} = [{self.number}]",
            "change": f"globals().get({self.name!r}, []).append({self.number})",
            "unbind": f"globals().pop({self.name!r}, None)",
            "write": f"import os\nos.makedirs('d', exist_ok=True)\n_f = open({self.name!r}, 'w'); _f.write('{self.number}')"
            "; _f.close()",
            "remove": f"import os\nif os.path.exists({self.name!r}): os.remove({self.name!r})",
        }[self.what]

    def do(self, state: State) -> None:
        if self.what == "bind":
            state.variables[self.name] = [self.number]
        elif self.what == "change":
            state.variables.get(self.name, []).append(self.number)
        elif self.what == "unbind":
            state.variables.pop(self.name, None)
        elif self.what == "write":
            state.files[self.name] = str(self.number)
        else:
            state.files.pop(self.name, None)


STEPS = st.one_of(
    st.builds(Step, st.sampled_from(["bind", "change", "unbind"]), st.sampled_from(NAMES), st.integers(0, 9)),
    st.builds(Step, st.sampled_from(["write", "remove"]), st.sampled_from(FILES), st.integers(0, 9)),
)
PROGRAMS = st.lists(STEPS, min_size=1, max_size=3)


def code_of(steps: list[Step]) -> str:
    return "\n".join(step.code for step in steps)


class Served:
    """A daemon that is killed and started again, over all examples."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.daemon: Daemon
        self.client: ExecutorClient
        self.start()

    def start(self) -> None:
        self.daemon = self._stack.enter_context(running_daemon(self._directory))
        self.client = self._stack.enter_context(self.daemon.client())

    def restart(self) -> None:
        self.daemon.kill()
        self.start()


class UndoMachine(RuleBasedStateMachine):
    """`served` is set by the test."""

    served: Served

    @initialize()
    def begin(self) -> None:
        self.session: Session = self.served.client.create_session(detached=True, authorized_imports=["os", "signal"])
        self.now = State()
        self.savepoints: dict[int, State] = {}
        self.branches: dict[int, State] = {}
        self.branch_results: dict[int, ExecutionResult] = {}
        self.count = 0
        self.generation = 1

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()

    # -- the model ---------------------------------------------------------------------------------------------------

    def _take(self, kept: dict[int, State], state: State) -> int:
        self.count += 1
        kept[self.count] = copy.deepcopy(state)
        if len(kept) > KEPT_MAX:
            del kept[min(kept)]
        return self.count

    def _go_to(self, state: State) -> None:
        self.now = copy.deepcopy(state)
        self.generation += 1

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(steps=PROGRAMS, savepoint=st.booleans())
    def execute(self, steps: list[Step], savepoint: bool) -> None:
        result = self.session.execute(code_of(steps), savepoint=savepoint)
        assert (result.outcome, result.state) == (Outcome.SUCCEEDED, VariablesState.KEPT), result
        assert result.savepoint == (self._take(self.savepoints, self.now) if savepoint else 0)
        for step in steps:
            step.do(self.now)

    @rule(steps=PROGRAMS, death=st.sampled_from(sorted(DEATHS)), savepoint=st.booleans())
    def die(self, steps: list[Step], death: str, savepoint: bool) -> None:
        result = self.session.execute(f"{code_of(steps)}\n{death}", savepoint=savepoint)
        self.generation += 1
        assert (result.outcome, result.generation) == (DEATHS[death], self.generation), result
        if savepoint:
            assert result.state is VariablesState.ROLLED_BACK
            assert result.savepoint == self._take(self.savepoints, self.now)
        else:
            assert result.state is VariablesState.RESET
            for step in steps:
                step.do(self.now)
            self.now.variables = {}

    @rule()
    def savepoint(self) -> None:
        taken = self.session.savepoint()
        assert (taken.number, taken.left_out) == (self._take(self.savepoints, self.now), ())

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.count))
        state = self.savepoints.get(number)
        if state is None:
            if number not in self.branches:
                with pytest.raises(NotFoundError):
                    self.session.rollback(number)
            return
        before = len(self.savepoints) + len(self.branches)
        done = self.session.rollback(number)
        self._go_to(state)
        for kept in (self.savepoints, self.branches):
            for later in [each for each in kept if each > number]:
                del kept[later]
        assert (done.generation, done.left_out) == (self.generation, ())
        assert done.dropped >= before - len(self.savepoints) - len(self.branches)

    @rule(programs=st.lists(PROGRAMS, min_size=1, max_size=3), death=st.none() | st.sampled_from(sorted(DEATHS)))
    def try_code(self, programs: list[list[Step]], death: str | None) -> None:
        codes = [code_of(steps) for steps in programs] + ([f"a = [0]\n{death}"] if death else [])
        results = self.session.try_(codes)
        assert all((each.state, each.generation) == (VariablesState.KEPT, self.generation) for each in results)
        for steps, result in zip(programs, results, strict=False):
            after = copy.deepcopy(self.now)
            for step in steps:
                step.do(after)
            branch = result.branch
            assert branch is not None
            assert branch.variables is not None
            assert branch.files is not None
            assert branch.number == self._take(self.branches, after)
            self.branch_results[branch.number] = result
            changes = _changes(self.now.variables, after.variables)
            found = branch.variables.added, branch.variables.changed, branch.variables.removed
            assert [[name for name in names if name in NAMES] for names in found] == changes, (self.now, after)
            added, changed, removed = _changes(self.now.files, after.files)
            assert [path for path in branch.files.added if path in FILES] == added
            assert set(changed) <= set(branch.files.changed) <= {step.name for step in steps} | {"d"}
            assert [path for path in branch.files.removed if path in FILES] == removed
        if death:
            assert results[-1].branch is not None
            assert not results[-1].branch.is_kept

    @precondition(lambda self: self.branch_results)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.branch_results)))
        state = self.branches.get(number)
        if state is None:
            with pytest.raises(NotFoundError):
                self.session.keep(self.branch_results[number])
            return
        done = self.session.keep(self.branch_results[number])
        self._go_to(state)
        for later in [each for each in self.savepoints if each > number]:
            del self.savepoints[later]
        assert (done.generation, done.left_out, done.savepoint.is_branch) == (self.generation, (), True)

    @rule()
    def restart_the_daemon(self) -> None:
        self.served.restart()
        self.session = self.served.client.get_session(self.session.session_id)

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_session_is_what_its_model_is(self) -> None:
        if hasattr(self, "session"):
            looked = self.session.execute(LOOK)
            assert looked.output == self.now.seen()
            assert looked.generation == self.generation
            assert [each.number for each in self.session.savepoints()] == sorted(self.savepoints)


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[list[str]]:
    return [
        sorted(after.keys() - before.keys()),
        sorted(name for name in before.keys() & after.keys() if before[name] != after[name]),
        sorted(before.keys() - after.keys()),
    ]


@pytest.mark.timeout(rounds(2400, 240))
def test_variables_and_files_are_always_those_of_the_model(tmp_path: Path) -> None:
    with ExitStack() as stack:
        UndoMachine.served = Served(tmp_path, stack)
        run_state_machine_as_test(
            UndoMachine,
            settings=settings(
                max_examples=rounds(60, 4),
                stateful_step_count=rounds(30, 12),
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
