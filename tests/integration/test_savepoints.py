"""Savepoints and undo, as users have them: in the clients, in an agent's executor, in the REPL, over a killed daemon."""

from __future__ import annotations

import hashlib
import io
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from executor_client import (
    Changes,
    ExecutionResult,
    ExecutorClient,
    InvalidRequest,
    NotFoundError,
    Session,
    VariablesState,
)
from executor_client.cli.console import Console
from executor_client.cli.repl import run
from executor_client.smolagents import CodeExecutionError, RemoteExecutor, UndoTool
from tests.support.audit import records
from tests.support.daemon import Daemon, running_daemon
from tests.support.polling import eventually


def test_a_session_goes_back_by_savepoint_number_and_steps(client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.execute("x = [1]; f = open('notes', 'w')")
        first = session.savepoint()
        session.execute("x.append(2); f.write('two'); f.flush()")
        second = session.savepoint()
        session.execute("x.append(3)")
        assert [each.number for each in session.savepoints()] == [first.number, second.number] == [1, 2]
        assert session.rollback().savepoint == second
        assert session.try_("x = 0").branch is not None, "a branch is no savepoint, though it is newer"
        assert session.rollback().savepoint == second
        assert session.execute("x").output == [1, 2]
        back = session.rollback(steps=2)
        assert (back.savepoint, back.dropped, back.left_out, back.generation) == (first, 1, (), 4)
        assert session.execute("x, f.tell(), open('notes').read()").output == ([1], 0, "")
        with pytest.raises(NotFoundError) as gone:
            session.rollback(second)
        assert gone.value.reason == "SAVEPOINT_NOT_FOUND"
        with pytest.raises(InvalidRequest, match="has 1 savepoints"):
            session.rollback(steps=2)
        with pytest.raises(InvalidRequest, match="0 is not a savepoint"):
            session.rollback(0)
    with client.create_session() as session, pytest.raises(NotFoundError, match="has no savepoint"):
        session.rollback()


def test_code_is_tried_and_the_best_branch_is_gone_on_from(client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.register_tools({"score": len})
        session.execute("x = [1]")
        one = session.try_("x.append(2); new = 3; x")
        assert (one.output, one.state, one.generation) == ([1, 2], VariablesState.KEPT, 1)
        assert one.branch is not None
        assert one.branch.variables == Changes(added=("new",), changed=("x",))
        tried = session.try_(["x = 'a'; score(x)", "x = 'abc'; score(x)", "1 / 0"])
        assert [each.output for each in tried] == [1, 3, None]
        assert [bool(each.branch and each.branch.is_kept) for each in tried] == [True, True, False]
        assert session.savepoints() == []
        assert session.execute("x").output == [1]
        best = max(tried, key=lambda each: each.output or 0)
        kept = session.keep(best)
        assert (kept.savepoint.is_branch, kept.generation, kept.dropped) == (True, 2, 0)
        assert session.execute("x").output == "abc"
        session.keep(one)
        assert session.execute("x, new").output == ([1, 2], 3)
        with pytest.raises(InvalidRequest, match="not kept: its program has not succeeded"):
            session.keep(tried[2])
        with pytest.raises(InvalidRequest, match="branch is of type int"):
            session.keep(3)  # type: ignore[arg-type]
        alone = session.try_("score(x)", tools=False)
        assert alone.error is not None
        assert "score" in alone.error.message


def test_each_branch_is_in_the_audit_log_as_an_execution_is(tmp_path: Path) -> None:
    codes = ["x = 1", "1 / 0"]
    with running_daemon(tmp_path) as daemon, daemon.client() as client, client.create_session() as session:
        session.keep(session.try_(codes)[0])
        session.execute("x")

        def written(kind: str) -> list[dict[str, Any]]:
            return [record for record in records(daemon.state_dir / "audit") if record["kind"] == kind]

        assert eventually(lambda: len(written("execution_ended")) == 3)
        hashes = [record["code_sha256"] for record in written("execution_requested")]
        assert hashes[:2] == [hashlib.sha256(code.encode()).hexdigest() for code in codes]
        assert [record.get("branch") for record in written("execution_ended")] == [1, 0, None]
        assert [record["savepoint"] for record in written("rollback_requested")] == [1]


def test_a_branch_outlives_the_daemon_that_began_it(tmp_path: Path) -> None:
    """And the client's own connection: the execution is attached to again, and ends with its changes."""
    with running_daemon(tmp_path) as first:
        session = first.client().create_session(detached=True)
        session.execute("x = 1")
        kept = session.try_("x = 2")
        begun = threading.Event()
        answers: list[ExecutionResult] = []

        def try_it() -> None:
            code = "import time\nprint('begun', flush=True)\nx = 3\nfor _ in range(15): time.sleep(0.1)"
            answers.append(session.try_(code, on_event=lambda event: begun.set()))

        thread = threading.Thread(target=try_it)
        thread.start()
        assert begun.wait(20)
        first.kill()
        with running_daemon(tmp_path) as second, second.client() as client:
            again = client.get_session(session.session_id)
            assert again.execute("x").output == 1, "it waits for the branch, which has left no trace"
            again.keep(kept)
            assert again.execute("x").output == 2
            thread.join()
            again.close()
    (tried,) = answers
    assert tried.branch is not None
    assert tried.branch.variables is not None
    assert tried.branch.variables.changed == ("x",)


def test_savepoints_outlive_the_daemon(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as first:
        session = first.client().create_session(detached=True)
        session.execute("x = 1")
        session.savepoint()
        session.execute("x = 2")
        first.kill()
        with running_daemon(tmp_path) as second, second.client() as client:
            again = client.get_session(session.session_id)
            assert [each.number for each in again.savepoints()] == [1]
            again.rollback()
            assert again.execute("x").output == 1
            again.close()


@pytest.fixture
def executor(daemon: Daemon) -> RemoteExecutor:
    return RemoteExecutor(["os"], address=daemon.address, token=daemon.token, savepoints="each-step")


def test_an_executor_undoes_steps_and_says_what_a_crash_has_left(executor: RemoteExecutor) -> None:
    with executor:
        executor.send_variables({"given": 10})
        executor("x = given")
        executor("given = 20; x = [given]")
        with pytest.raises(CodeExecutionError, match="files are as before this step"):
            executor("import os\nx = 'gone'\nos._exit(1)")
        assert executor("x").output == [20]
        executor("x.append(3); print('three')")
        executor.undo()
        assert executor.state["x"] == [20]
        assert executor.state["_print_outputs"] == ""
        executor.undo(2)
        assert (executor.state["x"], executor.state["given"]) == (10, 10)
        executor.undo()
        with pytest.raises(KeyError):
            executor.state["x"]
        with pytest.raises(InvalidRequest, match="0 steps can be undone"):
            executor.undo()
        assert executor.saved_kwargs()["savepoints"] == "each-step"


def test_a_model_may_undo_the_step_before(executor: RemoteExecutor) -> None:
    with executor:
        executor.send_tools({"undo_last_step": UndoTool(executor)})
        with pytest.raises(CodeExecutionError, match="0 steps can be undone"):
            executor("undo_last_step()")
        executor("x = 1")
        executor("x = 2")
        logs = executor("x = 3\nprint(undo_last_step())").logs
        assert logs.startswith("Note: Undone: `x = 2`, `x = 3…`. Variables, imports and files are as before.")
        assert executor("x").output == 1


THREADS = "import threading; e = threading.Event(); threading.Thread(target=e.wait, daemon=True).start()"


def test_a_step_without_a_savepoint_is_not_skipped_by_undo(daemon: Daemon) -> None:
    """It was left out of the history, so that undo went further back than asked, and did not say so."""
    with RemoteExecutor(["threading"], **daemon.access, savepoints="each-step") as executor:
        executor("first = 1")
        executor(THREADS)
        assert "no savepoint before this step: 1 threads of the program run" in executor("x = 1").logs
        assert "no savepoint" not in executor("x = 2\ny = 2").logs, "a cause is named once"
        with pytest.raises(InvalidRequest) as refused:
            executor.undo()
        assert "there is no savepoint before `x = 2…`: 1 threads of the program run" in refused.value.message
        assert (
            "undo 3 steps to go back to the nearest one, which undoes `import threading; e = " in refused.value.message
        )
        assert executor.state["x"] == 2, "nothing was undone"
        executor("e.set()")
        assert executor("x = 3").logs == "", "there is a savepoint again"
        assert executor.undo().undone == ("x = 3",)
        with pytest.raises(InvalidRequest, match=r"no savepoint before `e.set\(\)`"):
            executor.undo(1)
        back = executor.undo(4)
        assert [name[:9] for name in back.undone] == ["import th", "x = 1", "x = 2…", "e.set()"]
        assert executor("first, 'x' in globals()").output == (1, False)


def test_a_model_is_told_why_a_step_can_not_be_undone_and_may_go_further_back(daemon: Daemon) -> None:
    with RemoteExecutor(["threading", "os"], **daemon.access, savepoints="each-step") as executor:
        executor.send_tools({"undo_last_step": UndoTool(executor)})
        executor("x = 1")
        executor(THREADS)
        executor("x = 2")
        with pytest.raises(CodeExecutionError, match=r"no savepoint before `x = 2`: 1 threads .* undo 2 steps"):
            executor("undo_last_step()")
        assert executor("x").output == 2
        assert "Undone: `import threading;" in executor("print(undo_last_step(4))").logs
        assert executor("x").output == 1
        executor("x = 3")
        with pytest.raises(CodeExecutionError, match="as before this step"):
            executor("undo_last_step(); import os; os._exit(1)")
        assert executor("x").output == 1, "the step that asked was taken back already, and one more"


def test_a_step_that_was_interrupted_is_not_skipped_by_undo(executor: RemoteExecutor) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with executor:
        executor.send_tools({"interrupt": interrupt})
        executor("x = 1")
        with pytest.raises(KeyboardInterrupt):
            executor("x = 2; interrupt()")
        with pytest.raises(InvalidRequest, match=r"before `x = 2; interrupt.*: it was interrupted; undo 2 steps"):
            executor.undo()


def typed(session: Session, *lines: str) -> tuple[str, str]:
    """Types lines into a REPL, and returns what it has printed and remarked."""
    left = iter(lines)

    class Typed:
        def read(self, prompt: str) -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

    out, err = io.StringIO(), io.StringIO()
    with session, redirect_stdout(out), redirect_stderr(err):
        run(session, Console(), Typed())
    return out.getvalue(), err.getvalue()


def test_the_repl_says_which_statements_it_takes_back_and_which_it_can_not(client: ExecutorClient) -> None:
    session = client.create_session(authorized_imports=["threading"])
    out, said = typed(session, "y = 0", THREADS, "x = 1", "x = 2", "%undo", "x", "%undo 4", "'x' in globals()")
    assert out == "2\nFalse\n"
    assert said.count("no savepoint before this step") == 1
    assert "nothing was undone: there is no savepoint before `x = 2`: 1 threads of the program run" in said
    assert "undone: `import threading; e = " in said


def test_the_repl_takes_statements_back(client: ExecutorClient) -> None:
    lines = ["x = 1", "x = 2", "%undo", "x", "import os", "%undo 3", "%undo x", "x"]
    out, said = typed(client.create_session(), *lines)
    assert out == "1\n"
    assert "undone: `x = 2`; variables and files are as before" in said
    assert "undone: `x = 1`, `x`, `import os`; variables and files are as before" in said
    assert "%undo takes a number of statements" in said and "name 'x' is not defined" in said
