"""Files of an agent: initial files, files made by steps, and files as answers."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from smolagents import AgentLogger, FinalAnswerTool

from examples.scripted import Reply
from executor_client import ExecutorClient, InvalidRequest, NotFoundError
from executor_client.smolagents import RemoteExecutor
from executor_client.smolagents.files import scratch_directory
from tests.support.agents import agent_on
from tests.support.daemon import Daemon

ANSWERS = ["pathlib", "os"]


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def answering(daemon: Daemon, tmp_path: Path, shown: io.StringIO) -> Iterator[RemoteExecutor]:
    """An executor whose code can give final answers, with their files in `tmp_path / "answers"`."""
    logger = AgentLogger(console=Console(file=shown, width=300))
    with RemoteExecutor(ANSWERS, logger, download_dir=tmp_path / "answers", **daemon.access) as executor:
        executor.send_tools({"final_answer": FinalAnswerTool()})
        yield executor


# ---------------------------------------------------------------------------------------------------------------------
# The files of the session


def test_files_go_in_and_out_between_steps(executor: RemoteExecutor, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    executor.files.put(b"1,2\n", "table.csv")  # before any step: this creates the session
    executor.files.put_directory(tmp_path / "in", "many")
    assert executor("open('table.csv').read() + open('many/a.txt').read()").output == "1,2\na"
    executor("open('many/b.txt', 'w').write('b')")
    executor.files.get("many/b.txt", tmp_path / "b.txt")
    executor.files.get_directory("many", tmp_path / "out")
    assert (tmp_path / "b.txt").read_text() == (tmp_path / "out" / "b.txt").read_text() == "b"
    assert [each.path for each in executor.files.list()] == ["many", "many/a.txt", "many/b.txt", "table.csv"]


def test_the_model_and_the_caller_learn_which_files_a_step_made(daemon: Daemon) -> None:
    script: list[str | Reply] = [
        "open('report.csv', 'w').write('x' * 12_345)\nopen('a b\\n\\x1b[31m.txt', 'w').write('1')\n1 / 0",
        Reply("", "print('nothing made')", expects=["files: 'a b\\n\\x1b[31m.txt', 1 bytes; report.csv, 12 kB"]),
        "final_answer(1)",
    ]
    made: list[list[str]] = []

    def note(step: Any, agent: Any) -> None:
        made.append([each.path for each in agent.python_executor.last_artifacts])

    with agent_on(daemon, *script, step_callbacks=[note]) as agent:
        assert agent.run("go") == 1
    assert made == [["a b\n\x1b[31m.txt", "report.csv"], [], []]
    assert "files:" not in agent.memory.steps[2].observations


def test_of_many_files_some_are_named_and_all_are_counted(executor: RemoteExecutor) -> None:
    made = executor("for number in range(30):\n    open(f'f{number:02}{\"n\" * 200}', 'w').write('')")
    assert made.logs.startswith("files: f00nnn") and made.logs.endswith("0 bytes; and 20 more\n")
    assert len(made.logs) < 2_000
    assert len(executor.last_artifacts) == 30


def test_a_session_begins_with_files_and_so_does_one_that_replaces_it(
    daemon: Daemon, client: ExecutorClient, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("1\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m").write_text("m")
    with RemoteExecutor(files=[tmp_path / "rows.csv", tmp_path / "models"], **daemon.access) as executor:
        assert executor("open('rows.csv').read() + open('models/m').read()").output == "1\nm"
        for info in client.list_sessions():
            client.get_session(info.session_id).close()
        executor.send_variables({"x": 1})
        result = executor("open('rows.csv').read()")
    assert result.output == "1\n"
    assert "The new session starts with its files" in result.logs


def test_files_can_be_named_and_be_bytes(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "local").write_text("from disk")
    files = {"in/a": tmp_path / "local", "/workspace/b": b"bytes"}
    with agent_on(
        daemon, "final_answer([open('in/a').read(), open('b').read()])", executor_kwargs={"files": files}
    ) as agent:
        assert agent.run("go") == ["from disk", "bytes"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("one.csv", "files is of type str; write files="),
        (["/no/such/file"], "the file or directory '/no/such/file' does not exist"),
        ([b"bytes"], "files is of type list and holds bytes; write files="),
        ({"../out": b""}, "'../out' is not a path in the workspace"),
        ({"/etc/x": b""}, "'/etc/x' is not a path in the workspace"),
        ({"": b""}, "'' is not a path in the workspace"),
        ({"x": 5}, "'x' is a int; use a local path or bytes"),
        (["/etc/hostname", "/proc/sys/kernel/hostname"], "files contains the name 'hostname' twice"),
    ],
)
def test_files_that_cannot_be_put_are_refused_where_they_are_given(files: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        RemoteExecutor(files=files)


# ---------------------------------------------------------------------------------------------------------------------
# A file as the final answer


@pytest.mark.parametrize("path", ["'out/report.csv'", "'/workspace/out/report.csv'", "'./out//report.csv'"])
def test_a_path_as_final_answer_arrives_as_a_file(answering: RemoteExecutor, tmp_path: Path, path: str) -> None:
    code = "import os, pathlib\nos.makedirs('out')\npathlib.Path('out/report.csv').write_text('1,2')\n"
    answer = answering(f"{code}final_answer(pathlib.Path({path}))")
    assert answer.is_final_answer
    assert answer.output == tmp_path / "answers" / "report.csv"
    assert answer.output.read_text() == "1,2"


def test_without_a_directory_the_file_of_an_answer_is_there_after_the_agent(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("executor_client.smolagents.files._scratch", tmp_path)
    code = "import pathlib\npathlib.Path('a.txt').write_text('a')\nfinal_answer(pathlib.Path('a.txt'))"
    with agent_on(daemon, code, additional_authorized_imports=ANSWERS) as agent:
        answer = agent.run("go")
    assert answer.parent == scratch_directory() == tmp_path
    assert answer.read_text() == "a"


def test_no_file_of_the_client_is_replaced(answering: RemoteExecutor, tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "a.txt").write_text("mine")
    (tmp_path / "answers" / "a-2.txt").symlink_to(tmp_path / "elsewhere")
    answer = answering("import pathlib\npathlib.Path('a.txt').write_text('a')\nfinal_answer(pathlib.Path('a.txt'))")
    assert answer.output.name == "a-3.txt"
    assert (tmp_path / "answers" / "a.txt").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "local"),
    [(".bashrc", "_bashrc"), ("a\n\x1b]0;x\x07.txt", "a___0_x_.txt"), ("中" * 80, "中" * 16)],
)
def test_names_from_a_sandbox_are_cleaned(answering: RemoteExecutor, name: str, local: str) -> None:
    code = f"import pathlib\npath = pathlib.Path({name!r})\npath.write_text('a')\nfinal_answer(path)"
    assert answering(code).output.name == local


@pytest.mark.parametrize(
    ("making", "message"),
    [
        ("os.symlink('/proc/self/mem', 'x')", "the files of /proc can't be used"),
        ("os.mkdir('x')", "'x' is a directory"),
        ("os.mkfifo('x')", "'x' is not a regular file"),
        ("pass", "there is no 'x'"),
        ("f = open('x', 'w'); f.truncate(1 << 29); f.close()", "536,870,912 bytes; max_bytes is"),
        ("path = pathlib.Path('y' * 5000)", "at most 4096 bytes"),
    ],
)
def test_an_answer_that_is_no_file_that_could_be_had_is_reported_to_the_code(
    answering: RemoteExecutor, tmp_path: Path, making: str, message: str
) -> None:
    """The model can correct itself: the error is one of the call, and the run goes on."""
    code = f"""
import os, pathlib
path = pathlib.Path("x")
{making}
try:
    final_answer(path)
except (FileNotFoundError, ValueError) as error:
    message = str(error)
message
"""
    seen = answering(code)
    assert not seen.is_final_answer
    assert message in seen.output and "Answer with the path of a regular file" in seen.output
    assert str(tmp_path) not in seen.output
    assert not (tmp_path / "answers").exists() or not list((tmp_path / "answers").iterdir())
    assert answering("final_answer(str(path))").is_final_answer


@pytest.mark.parametrize("path", ["/etc/passwd", "/workspace/../etc/passwd", "/workspace", "/workspaces/x"])
def test_a_path_outside_the_workspace_stays_a_path(
    answering: RemoteExecutor, shown: io.StringIO, tmp_path: Path, path: str
) -> None:
    answer = answering(f"import pathlib\nfinal_answer(pathlib.Path({path!r}))")
    assert answer.output == Path(path)
    assert "is not a file of the workspace; it stays a path" in shown.getvalue()
    assert not (tmp_path / "answers").exists()


def test_a_disk_that_takes_no_file_is_reported_without_the_clients_paths(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with RemoteExecutor(ANSWERS, download_dir=tmp_path / "taken", **daemon.access) as executor:
        executor.send_tools({"final_answer": FinalAnswerTool()})
        code = "import pathlib\npathlib.Path('x').write_text('a')\ntry:\n    final_answer(pathlib.Path('x'))\nexcept ValueError as error:\n    message = str(error)\nmessage"
        message = executor(code).output
    assert "could not be written on the client" in message
    assert str(tmp_path) not in message


def test_a_path_that_the_users_own_tool_answers_with_is_the_users(daemon: Daemon, tmp_path: Path) -> None:
    class Report(FinalAnswerTool):
        def forward(self, answer: Any) -> Any:
            return tmp_path / "mine.txt"

    with agent_on(daemon, "final_answer('x')", tools=[Report()]) as agent:
        assert agent.run("go") == tmp_path / "mine.txt"


# ---------------------------------------------------------------------------------------------------------------------
# The start of a run


def test_an_executor_goes_on_in_a_session_and_leaves_it(daemon: Daemon, client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["os"]) as session:
        session.execute("x = 41")
        for given, access in ((session, {}), (session.session_id, daemon.access)):
            with RemoteExecutor(session=given, **access) as executor:
                assert executor("x += 1\nx").output == (42 if given is session else 43)
        assert session.execute("x").output == 43


def test_a_given_session_that_is_gone_is_not_replaced(daemon: Daemon, client: ExecutorClient) -> None:
    session = client.create_session()
    with RemoteExecutor(session=session) as executor:
        executor("x = 1")
        session.close()
        with pytest.raises(NotFoundError):
            executor.send_variables({"y": 1})
    assert client.list_sessions() == []


def test_what_belongs_to_a_new_session_is_refused_with_a_given_one(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match=r"image, files only applies to a new one"):
        RemoteExecutor(session="0" * 32, image="base", files={"x": b""}, **daemon.access)


def test_a_run_begins_with_a_state_backend_and_labels(daemon: Daemon, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.execute("x = 41\nopen('kept', 'w').write('k')")
        state = session.export_state()
        backend = session.info.backend
    settings = {"state": state, "labels": {"who": "test"}, "backend": backend}
    with agent_on(daemon, "final_answer([x + 1, open('kept').read()])", executor_kwargs=settings) as agent:
        assert agent.run("go") == [42, "k"]
        (info,) = client.list_sessions()
        assert (info.labels, info.backend) == ({"who": "test"}, backend)


def test_the_directory_of_answers_ends_with_its_process_and_not_with_a_forked_child() -> None:
    code = """
import os, sys
from executor_client.smolagents.files import scratch_directory
directory = scratch_directory()
child = os.fork()
if not child:
    sys.exit()  # with all that is registered for the end of a process
os.waitpid(child, 0)
print(directory, directory.is_dir())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(path).exists()
