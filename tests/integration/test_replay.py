"""`executor replay --execute` and `executor record diff`: recordings that run again, and those that diverge."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_client import (
    ExecutorClient,
    InvalidRequest,
    ProcessOutput,
    Recorder,
    Recording,
    Session,
    TerminalSize,
    Tool,
)
from executor_client.cli import main
from executor_client.recording import Entry
from tests.support.backend_daemon import daemon_on
from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.replayed import POLICY

Change = Callable[[Entry, dict[str, Any]], bool | None]
"""Changes the fields of an entry; False leaves the entry out."""


@pytest.fixture
def recording(client: ExecutorClient, tmp_path: Path) -> Path:
    """A session that uses whatever a recording must bring back."""
    require("local")
    path = tmp_path / "run.rxr"

    def weather(city: str) -> int:
        if city == "Atlantis":
            raise KeyError(city)
        return 21

    final = Tool(lambda answer: {"answer": answer}, is_final_answer=True)
    double = Tool(lambda number: number * 2, placement="sandbox")
    with client.create_session(prelude="ANSWER = 42") as session, session.record(path):
        session.register_tools({"weather": weather, "final_answer": final, "double": double})
        session.set_variables({"numbers": list(range(2_000)), "count": len})
        session.files.write("data/a.txt", b"x" * 5_000)
        session.execute("first = weather('Paris')\nprint('it is', first, ANSWER, object())")
        savepoint = session.savepoint()
        session.execute("first = 5\nprint(weather('Rome'), weather('Oslo'))")
        session.rollback(savepoint)
        session.execute("try:\n    weather('Atlantis')\nexcept KeyError as error:\n    print(repr(error))")
        session.execute("[first, double(sum(numbers)), count(open('data/a.txt').read()), object()]")
        session.execute("open('out.txt', 'w').write('x')\n1 / 0")
        session.execute("final_answer(first)")
    return path


def changed(path: Path, change: Change) -> Path:
    """Writes the recording anew with changed entries, as an attacker or another version of the program would."""
    new = path.with_name("changed.rxr")
    with Recording(path) as old, Recorder(new) as recorder:
        for entry in old.entries():
            fields = copy.deepcopy(dict(entry.fields))
            for payload in (place for place in _payloads(fields) if "blob" in place):
                recorder.payload(old.payload(payload))
            if change(entry, fields) is not False:
                recorder.add(entry.kind, fields, step=entry.step)
    return new


def _payloads(fields: Any) -> list[Any]:
    if not isinstance(fields, dict | list):
        return []
    inside = [found for each in (fields.values() if isinstance(fields, dict) else fields) for found in _payloads(each)]
    return [fields, *inside] if isinstance(fields, dict) and "blob" in fields else inside


def execute(daemon: Daemon, path: Path, *more: str) -> int:
    return main(["replay", str(path), "--execute", "--address", daemon.address, "--token", daemon.token, *more])


def test_a_recording_runs_again_as_it_was(daemon: Daemon, recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tools are not there: their answers, errors and final answers come from the recording."""
    assert execute(daemon, recording) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"step {number}: as recorded" for number in range(1, 7)),
        "verified: all 6 steps went as recorded",
    ]


@pytest.mark.parametrize("step", [1, 3])
def test_a_divergence_is_reported_at_its_step(
    daemon: Daemon, recording: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(entry: Entry, fields: dict[str, Any]) -> None:
        if entry.step == step and "log" in fields:
            fields["log"]["text"] = "other"

    planted = changed(recording, change)
    assert execute(daemon, planted) == 3
    out = capsys.readouterr().out.splitlines()
    assert out[: step - 1] == [f"step {number}: as recorded" for number in range(1, step)]
    assert out[step - 1 : step + 2] == ["diverged", f"step {step}: printed text", "  expected: 'other'"]
    assert execute(daemon, planted, "--from-step", str(step + 1)) == 0
    assert f"step {step}: run, not compared" in capsys.readouterr().out
    assert main(["record", "diff", str(recording), str(planted)]) == 3
    assert f"step {step}: printed text" in capsys.readouterr().out


def _other_arguments(entry: Entry, fields: dict[str, Any]) -> None:
    if entry.step == 2 and entry.kind == "execute":
        fields["code"] = fields["code"].replace("'Oslo'", "'Bergen'")


def _other_order(entry: Entry, fields: dict[str, Any]) -> None:
    if entry.step == 2 and entry.kind == "execute":
        fields["code"] = "weather('Oslo'), weather('Rome')"


def _more_often(entry: Entry, fields: dict[str, Any]) -> None:
    if entry.step == 2 and entry.kind == "execute":
        fields["code"] += "\nweather('Rome')"


def _less_often(entry: Entry, fields: dict[str, Any]) -> None:
    if entry.step == 2 and entry.kind == "execute":
        fields["code"] = "weather('Rome')"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (_other_arguments, ["tool call 2", "weather('Oslo')", "weather('Bergen')"]),
        (_other_order, ["tool call 1", "weather('Rome')", "weather('Oslo')"]),
        (_more_often, ["tool call 3", "no further tool call", "weather('Rome')"]),
        (_less_often, ["tool call 2", "weather('Oslo')", "no call; the step ended as succeeded"]),
    ],
)
def test_a_tool_that_is_called_otherwise_is_a_divergence(
    daemon: Daemon, recording: Path, change: Change, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(daemon, changed(recording, change)) == 3
    what, expected, got = lines
    shown = ["diverged", f"step 2: {what}", f"  expected: {expected}", f"  got:      {got}"]
    assert capsys.readouterr().out.splitlines() == ["step 1: as recorded", *shown]


def test_an_incomplete_recording_is_unverified(
    daemon: Daemon, client: ExecutorClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late, redacted = tmp_path / "late.rxr", tmp_path / "redacted.rxr"
    with client.create_session() as session:
        session.files.write("a.txt", b"1")
        with session.record(late):
            session.execute("2 + 2")
    with client.create_session() as session, session.record(redacted, redact_tools=["crm_*"]):
        session.register_tools({"crm_find": lambda name: "secret"})
        session.execute("crm_find('Ada')")
    for path, why in ((late, "before the recording"), (redacted, "the answer of the tool crm_find")):
        assert execute(daemon, path) == 4
        out = capsys.readouterr().out
        assert "unverified" in out and why in out


def use_commands(session: Session) -> None:
    """Commands with input, a terminal, a signal, an end without output, a refused start, and one that runs on."""
    session.processes.run("sort; date +%N >&2; exit 3", input="b\na\n")
    with pytest.raises(InvalidRequest):
        session.processes.run(["no-such-program"])
    with session.processes.start("read -p 'Who? ' name; echo Hello, $name", pty=TerminalSize(80, 24)) as terminal:
        assert terminal.read_bytes(5.0, max_bytes=5) == b"Who? "
        terminal.write("Ada\n")
        assert b"Hello, Ada" in b"".join(each.data for each in terminal if isinstance(each, ProcessOutput))
    with session.processes.start(["sleep", "1000"]) as sleeping:
        sleeping.terminate()
        assert sleeping.wait(5.0).signal == 15
    session.processes.run("echo 42 > number.txt", env={})
    assert session.execute("open('number.txt').read()").output == "42\n"
    server = session.processes.start("echo ready; exec sleep 1000")
    assert next(iter(server), None) is not None
    server.close()


def test_commands_run_again_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text on stderr differs, which is a note. The client has not read the end of the last command, the daemon has."""
    require("local")
    of_client, of_daemon = tmp_path / "client.rxr", tmp_path / "daemon.rxr"
    with daemon_on("local", policy=POLICY) as daemon, daemon.client() as client:
        with client.create_session() as session, session.record(of_client):
            use_commands(session)
        client.get_recording(session.session_id, of_daemon)
        assert execute(daemon, of_client) == 4
        assert "not verified: the end of command 6\n" in capsys.readouterr().out
        assert execute(daemon, of_daemon) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step 1: as recorded\n")
    assert re.search(r"note, .*\nsession: command 1 \(sort; .*\): text on stderr\n", shown)
    assert "verified: all 1 steps and 6 commands went as recorded\n" in shown
    assert main(["record", "diff", str(of_daemon), str(of_daemon)]) == 0
    capsys.readouterr()
    assert main(["replay", str(of_daemon)]) == 0
    told = re.sub(r"^ *[\d.]*s? │ ", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert "$ sort; date +%N >&2; exit 3\ninput of 4 bytes\n" in told and "command: exit code 3" in told


def _other_output(entry: Entry, fields: dict[str, Any]) -> None:
    if "output" in fields.get("event", {}):
        fields["event"]["output"]["data"] = "Yg=="


def _other_end(entry: Entry, fields: dict[str, Any]) -> None:
    if "result" in fields.get("event", {}):
        fields["event"]["result"]["exit_code"] = 1


def _refused(entry: Entry, fields: dict[str, Any]) -> bool:
    return entry.kind != "output"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (_other_output, ["output", "'b'", "'a'"]),
        (_other_end, ["end", "'exit code 1'", "'exit code 0'"]),
        (_refused, ["", "refused", "it runs"]),
    ],
)
def test_a_command_that_goes_otherwise_is_a_divergence(
    daemon: Daemon,
    client: ExecutorClient,
    tmp_path: Path,
    change: Change,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with client.create_session() as session, session.record(tmp_path / "run.rxr"):
        session.processes.run(["printf", "a"])
    assert execute(daemon, changed(tmp_path / "run.rxr", change)) == 3
    what, expected, got = lines
    what = "session: command 1 (printf a)" + (what and f": {what}")
    assert capsys.readouterr().out.splitlines()[1:] == [what, f"  expected: {expected}", f"  got:      {got}"]


def test_the_output_of_ignored_commands_is_not_compared(
    daemon: Daemon, client: ExecutorClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.create_session() as session, session.record(tmp_path / "run.rxr"):
        session.processes.run("ls -l > listed; cat listed")
        session.processes.run("date +%N")
    assert execute(daemon, tmp_path / "run.rxr") == 3
    assert "session: command 2 (date +%N): output" in capsys.readouterr().out.splitlines()
    assert execute(daemon, tmp_path / "run.rxr", "--ignore", "date") == 4
    assert "not verified: output of command 2, which is ignored" in capsys.readouterr().out
    other_end = changed(tmp_path / "run.rxr", _other_end)
    assert execute(daemon, other_end, "--ignore", "printf", "--ignore", "ls", "--ignore", "date") == 3


def _endless(entry: Entry, fields: dict[str, Any]) -> None:
    if entry.kind == "command":
        fields["argv"] = ["yes"]


def test_a_command_that_prints_without_end_is_a_divergence_and_not_kept(
    daemon: Daemon, client: ExecutorClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.create_session() as session, session.record(tmp_path / "run.rxr"):
        session.processes.run(["printf", "a"])
    endless = changed(tmp_path / "run.rxr", _endless)
    before = psutil.Process().memory_info().rss
    assert execute(daemon, endless) == 3
    assert "session: command 1 (yes): output" in capsys.readouterr().out.splitlines()
    assert psutil.Process().memory_info().rss < before + (64 << 20)
