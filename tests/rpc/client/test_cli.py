"""The command line: what comes out where, and with which exit code."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import PIL.Image
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_client import Wait, cli
from executor_client.cli import repl
from executor_client.cli.console import Console
from tests.support.fake_daemon import SESSION, TOKEN, FakeDaemon, Refusal, log, result

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def address(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTOR_ADDRESS", daemon.address)
    monkeypatch.setenv("EXECUTOR_TOKEN", TOKEN)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "f.py").write_text("print('é')", "utf-8")
    return str(tmp_path / "f.py")


def test_run_streams_output_and_ends_with_the_outcome(daemon: FakeDaemon, file: str, capsys: Captured) -> None:
    daemon.journal = [log("out\n"), log("err\n", types.OUTPUT_STREAM_STDERR), result(5)]
    assert cli.main(["run", "--imports", "numpy.*, os", "--image", "data", "--timeout", "2.5", file]) == 0
    assert capsys.readouterr() == ("out\n", "err\n")
    assert daemon.names() == ["CreateSession", "PutFile", "Execute", "DeleteSession"]
    create, execute, delete = (dict(daemon.requests)[name] for name in ("CreateSession", "Execute", "DeleteSession"))
    assert (create.image, list(create.authorized_imports)) == ("data", ["numpy.*", "os"])
    assert (create.limits.wall_time_s, execute.code, delete.session_id) == (2.5, "print('é')", SESSION)


def test_failed_program_is_exit_code_1_with_its_traceback(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1/0"))
    error = types.ErrorDetail(type="ZeroDivisionError", message="no", traceback="Traceback ...\n")
    daemon.journal = [result(outcome=types.OUTCOME_EXCEPTION, error=error, variables_state=types.VARIABLES_STATE_RESET)]
    assert cli.main(["run", "-"]) == 1
    assert dict(daemon.requests)["Execute"].code == "1/0"
    err = capsys.readouterr().err
    assert err.startswith("Traceback ...\n") and "variables are lost" in err


def test_options_of_the_daemon_may_follow_the_command(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXECUTOR_ADDRESS")
    assert cli.main(["ps", "--address", daemon.address]) == 0
    assert daemon.names() == ["ListSessions"]


@pytest.mark.parametrize("marks", ["\n         ^^^^^", "\n    ~~~~~^^^^^", ""])
def test_a_traceback_in_the_repl_has_the_line_as_it_was_typed(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch, marks: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("tabel\n"))
    traceback = f'Traceback:\n  File "<execution-1>", line 1\n    __ = tabel{marks}\nNameError: tabel\n'
    error = types.ErrorDetail(type="NameError", message="tabel", traceback=traceback)
    daemon.journal = [result(outcome=types.OUTCOME_EXCEPTION, error=error)]
    assert cli.main(["repl"]) == 0
    typed = marks.replace(" " * 9, " " * 4)
    assert f"line 1\n    tabel{typed}\nNameError" in capsys.readouterr().err


def test_refusal_is_exit_code_2_in_one_line(daemon: FakeDaemon, file: str, capsys: Captured) -> None:
    daemon.refusals["CreateSession"].append(Refusal(grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_IMAGE", "no image x"))
    assert cli.main(["run", file]) == 2
    assert capsys.readouterr().err == "executor: no image x\n"
    assert cli.main(["run", "/does/not/exist.py"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "FILE"], ["ps", "--json"], ["--version"], ["run", "--help"]])
def test_a_full_disk_for_the_output_is_a_line_and_exit_code_2(
    daemon: FakeDaemon, file: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    daemon.journal = [log("text\n"), result()]
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main([each.replace("FILE", file) for each in arguments]) == 2
    assert "executor: the output can't be written: No space left on device; free" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", "--tenant", "x\udcff"],
        ["approvals", "approve", "x\udcff"],
        ["run", "--image", "x\udcff", "-c", "1"],
        ["run", "-c", "'x\udcff'"],
        ["record", "get", "x\udcff"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_an_argument_that_is_not_utf_8_is_refused_in_one_line(
    daemon: FakeDaemon, capsys: Captured, arguments: list[str]
) -> None:
    """Python reads such bytes as halves of surrogate pairs, which no message can hold: it was a traceback."""
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("executor: ")


def test_each_violation_stands_on_its_line(daemon: FakeDaemon, file: str, capsys: Captured) -> None:
    names = ("memory_bytes", "operations")
    listed = types.Violations(
        violations=[types.Violation(field=f"limits.{name}", requested="9", allowed="at most 8") for name in names]
    )
    refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION", more=(listed,))
    daemon.refusals["CreateSession"].append(refusal)
    assert cli.main(["run", file]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "executor: the policy refuses this:",
        "  limits.memory_bytes: asked for 9, allowed is at most 8",
        "  limits.operations: asked for 9, allowed is at most 8",
    ]


def test_long_wait_is_told_on_a_terminal(
    daemon: FakeDaemon, file: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_client._core.waiting.WAIT_REPORTED_AFTER_S", 0.02)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    barrier = daemon.barriers["CreateSession"] = threading.Event()
    show = Console.show_wait

    def show_and_go_on(console: Console, wait: Wait) -> None:
        show(console, wait)
        barrier.set()

    monkeypatch.setattr(Console, "show_wait", show_and_go_on)
    assert cli.main(["run", "--image", "data", file]) == 0
    assert capsys.readouterr().err.startswith("[waiting for a sandbox of image 'data' (0 s, timeout 120 s)]\n")


def test_warning_of_a_limit_is_a_line_on_stderr(daemon: FakeDaemon, file: str, capsys: Captured) -> None:
    warning = types.LimitWarningEvent(limit="session_operations", used=8_000, budget=10_000)
    daemon.journal = [types.Event(limit_warning=warning), result()]
    assert cli.main(["run", file]) == 0
    assert capsys.readouterr() == ("", "[warning: 8,000 of 10,000 session_operations are used up]\n")


def test_policy_says_what_may_be_asked_for(daemon: FakeDaemon, capsys: Captured) -> None:
    daemon.policy.images.append("data\n\x1b[2J")
    daemon.policy.backends.extend(["docker", "e2b"])
    assert cli.main(["policy"]) == 0
    out = capsys.readouterr().out
    rows = [line.strip().split("  ", 1) for line in out.splitlines() if line]
    shown = {name: " ".join(cells.split()) for name, cells in rows}
    assert shown["profile"] == "strict, version 7, fingerprint abc"
    assert shown["images"] == "base, data\\n\\x1b[2J"
    assert shown["backend"] == "docker, else e2b"
    assert (shown["imports"], shown["refused in code"]) == ("math", "dynamic_code")
    assert (shown["files put"], shown["files got"]) == ("1,000 bytes each, 3 in a session", "2,000 bytes each")
    assert (shown["quota sessions"], shown["quota cpu_time_s_per_hour"]) == ("4", "0.5")
    assert (shown["wall_time_s"], shown["operations"]) == ("30 60 10 20.5", "1,000,000 2,000,000 - -")


def test_policy_says_which_hosts_may_be_reached(daemon: FakeDaemon, capsys: Captured) -> None:
    assert cli.main(["policy"]) == 0
    out = capsys.readouterr().out
    rows = [line.strip().split("  ", 1) for line in out.splitlines() if line]
    assert [(name, " ".join(cells.split())) for name, cells in rows[3:9]] == [
        ("network", "pypi.org:443"),
        ("on request", "*.example.com"),
        ("never", "gist.github.com"),
        ("header", "X-Key is set by the daemon for api.example.com (GET /a/*)"),
        ("connections", "3 at a time, 40 new ones in a minute, 7.5 s each"),
        ("bytes", "5,000 sent, 6,000 received in a session"),
    ]
    daemon.policy.network_rules.Clear()
    assert cli.main(["policy"]) == 0
    assert ["network", "none"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_hosts_are_asked_for_by_name(daemon: FakeDaemon, capsys: Captured) -> None:
    options = ["--network", "pypi.org:443", "--network", "a.example, *.b.example"]
    assert cli.main(["run", *options, "-c", "1"]) == 0
    assert list(daemon.requests[0][1].network) == ["pypi.org:443", "a.example", "*.b.example"]
    assert cli.main(["run", "--session", SESSION, *options, "-c", "1"]) == 2
    assert "--network: not possible for an existing session" in capsys.readouterr().err


def test_images_are_saved_where_asked(daemon: FakeDaemon, file: str, tmp_path: Path, capsys: Captured) -> None:
    raw = io.BytesIO()
    PIL.Image.new("RGB", (3, 2)).save(raw, "PNG")
    good = types.Event(image=types.ImageEvent(data=types.Payload(inline=raw.getvalue()), mime_type="image/png"))
    bad = types.Event(image=types.ImageEvent(data=types.Payload(inline=b"?"), mime_type="../../x"))
    daemon.journal = [bad, good, result()]
    assert cli.main(["run", "--save-images", str(tmp_path / "new" / "dir"), file]) == 0
    assert [path.name for path in (tmp_path / "new" / "dir").iterdir()] == ["image-1.png"]
    assert "an image was refused" in capsys.readouterr().err
    assert cli.main(["run", file]) == 0
    assert "3x2 pixels; --save-images" in capsys.readouterr().err


def test_artifacts_are_named_in_one_line(daemon: FakeDaemon, file: str, capsys: Captured) -> None:
    made = [types.FileInfo(path=name) for name in ("a.csv", "b\n\x1b[2J")]
    daemon.journal = [result(artifacts=made)]
    assert cli.main(["run", file]) == 0
    assert capsys.readouterr().err == "[created or changed: a.csv, b\\n\\x1b[2J]\n"
    daemon.journal = [result(artifacts=[types.FileInfo(path=str(n)) for n in range(12)])]
    cli.main(["run", file])
    assert capsys.readouterr().err == "[created or changed: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and more]\n"


def test_artifacts_are_saved_where_asked_and_nowhere_else(
    daemon: FakeDaemon, file: str, tmp_path: Path, capsys: Captured
) -> None:
    daemon.file = [pb.GetFileResponse(file=types.FileInfo(size_bytes=1)), pb.GetFileResponse(data=b"x")]
    made = [types.FileInfo(path=name, size_bytes=1) for name in ("d/a", "../b", "/c")]
    daemon.journal = [result(artifacts=made)]
    assert cli.main(["run", "--get-artifacts", str(tmp_path / "new"), file]) == 0
    saved = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(saved) == ["f.py", "new/d/a"]
    err = capsys.readouterr().err
    assert "'../b' was not saved: " in err and "'/c' was not saved: " in err


def test_cp_copies_to_a_session_by_the_beginning_of_its_id(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    assert cli.main(["cp", str(tmp_path / "f"), f"{SESSION[:3]}:there"]) == 0  # the fake's paths are all directories
    assert cli.main(["cp", str(tmp_path / "f"), f"{SESSION}:"]) == 0
    assert daemon.files == {"there/f": b"x", "f": b"x"}
    for _ in range(2):
        daemon.refusals["ManageFile"].append(Refusal(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND"))
    assert cli.main(["cp", str(tmp_path / "f"), f"{SESSION}:new"]) == 0
    assert daemon.files["new"] == b"x"
    assert cli.main(["cp", str(tmp_path), f"{SESSION}:dir"]) == 0
    assert daemon.requests[-1][1].format == types.FILE_FORMAT_TAR and "dir" in daemon.files


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("here", "there"), "one of SRC and DST must be SESSION:PATH"),
        ((f"{SESSION}:a", f"{SESSION}:b"), "one of SRC and DST must be SESSION:PATH"),
        (("./a:b", "c"), "one of SRC and DST must be SESSION:PATH"),
        (("x:a", "b"), "there is no session 'x'; there are the-session"),
        ((":a", "b"), "one of SRC and DST must be SESSION:PATH"),
        (("/does/not/exist", f"{SESSION}:b"), "No such file or directory: '/does/not/exist'"),
        ((f"{SESSION}:a", "/does/not/exist"), "No such file or directory"),
    ],
)
def test_cp_refuses_in_one_line(daemon: FakeDaemon, capsys: Captured, arguments: tuple[str, str], said: str) -> None:
    daemon.refusals["ManageFile"].append(Refusal(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND"))
    assert cli.main(["cp", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


def test_cp_wants_more_of_an_id_that_begins_several(daemon: FakeDaemon, capsys: Captured) -> None:
    daemon.sessions = [types.Session(session_id=name, state=types.SESSION_STATE_IDLE) for name in ("ab1", "ab2", "ab")]
    assert cli.main(["cp", __file__, "a:x"]) == 2
    assert "'a' matches 3 sessions" in capsys.readouterr().err
    assert cli.main(["cp", __file__, "ab:x"]) == 0, "a whole id is no beginning"


def test_ps_says_why_a_session_is_lost(daemon: FakeDaemon, capsys: Captured) -> None:
    reason = "its container was removed\n"
    daemon.sessions = [types.Session(session_id="s", state=types.SESSION_STATE_LOST, lost_reason=reason)]
    assert cli.main(["ps"]) == 0
    assert "s        -     lost (its container was removed\\n)" in capsys.readouterr().out


def _kept(expression: str) -> str:
    return f"__ = {expression}\nif __ is not None: _ = __\n__"


def test_repl_executes_whole_statements_and_shows_values(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("for i in x:\n  f(i)\n\n\n1 +* 2\nawait g()\n'é'; x  # x\n"))
    daemon.journal = [result("a\x1b")]
    assert cli.main(["repl"]) == 0
    codes = [request.code for name, request in daemon.requests if name == "Execute"]
    assert codes == ["for i in x:\n  f(i)\n", "1 +* 2", _kept("await g()"), "'é'; " + _kept("x")]
    assert capsys.readouterr().out.count("'a\\x1b'\n") == 4


def test_repl_ends_with_its_sandbox(daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\n"))
    daemon.journal = [result(outcome=types.OUTCOME_LOST, variables_state=types.VARIABLES_STATE_LOST)]
    assert cli.main(["repl"]) == 1
    assert daemon.names().count("Execute") == 1


def test_interrupt_at_the_prompt_drops_the_input_only(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[str | BaseException] = iter(["def f():", KeyboardInterrupt(), "1", EOFError()])

    def typed(prompt: str) -> str:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(repl, "input", typed, raising=False)
    assert cli.main(["repl"]) == 0
    assert [request.code for name, request in daemon.requests if name == "Execute"] == [_kept("1")]


def test_what_follows_the_program_is_its_own(daemon: FakeDaemon, capsys: Captured) -> None:
    """Its session may import all that the policy allows, and nothing is fetched for that."""
    daemon.policy.allowed_imports[:] = ["*"]
    daemon.session.authorized_imports[:] = ["*"]
    daemon.session.ClearField("refused_language")
    daemon.session.ClearField("denied_imports")
    assert cli.main(["run", "-c", "print(1)", "a", "--n", "3", "--", "--image"]) == 0
    assert daemon.names() == [
        "CreateSession",
        "GetPolicy",
        "AuthorizeImports",
        "RegisterTools",
        "Execute",
        "DeleteSession",
    ]
    requests = dict(daemon.requests)
    assert list(requests["CreateSession"].authorized_imports) == []
    assert list(requests["AuthorizeImports"].authorized_imports) == ["*"]
    assert "['-c', 'a', '--n', '3', '--', '--image']" in requests["Execute"].code


def test_run_goes_on_in_a_session_which_stays(daemon: FakeDaemon, capsys: Captured) -> None:
    arguments = ["--session", SESSION[:3], "--imports", "os", "--timeout", "2", "-c", "x"]
    assert cli.main(["run", *arguments]) == 0
    assert daemon.names() == ["ListSessions", "GetSession", "AuthorizeImports", "Execute"]
    requests = dict(daemon.requests)
    assert list(requests["AuthorizeImports"].authorized_imports) == ["os"]
    assert requests["Execute"].limits.wall_time_s == 2
    assert cli.main(["run", "--image", "data", *arguments]) == 2
    assert "--image: not possible for an existing session" in capsys.readouterr().err


def test_refused_import_names_the_option_that_authorizes_it(daemon: FakeDaemon, capsys: Captured) -> None:
    error = types.ErrorDetail(type="ImportDenied", message="no", statement="import os.path, sys")
    daemon.journal = [result(outcome=types.OUTCOME_IMPORT_DENIED, error=error)]
    assert cli.main(["run", "-c", "import os.path, sys"]) == 1
    assert "[--imports os.path,sys authorizes it" in capsys.readouterr().err
    assert cli.main(["exec", SESSION[:3], "import os.path, sys"]) == 1
    assert f"`executor repl --session {SESSION[:12]} --imports os.path,sys`" in capsys.readouterr().err


def test_limits_are_asked_for_by_name(daemon: FakeDaemon, capsys: Captured) -> None:
    assert cli.main(["run", "--limit", "memory_bytes=5", "--limit", "wall_time_s=1.5", "-c", ""]) == 0
    create = dict(daemon.requests)["CreateSession"]
    assert (create.limits.memory_bytes, create.limits.wall_time_s) == (5, 1.5)
    assert cli.main(["run", "--limit", "walltime=1", "-c", ""]) == 2
    assert "walltime" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["run", "--limit", "5", "-c", ""])
    assert "'5' is not NAME=VALUE" in capsys.readouterr().err


def test_exec_prints_the_value_and_leaves_the_session(daemon: FakeDaemon, capsys: Captured) -> None:
    daemon.journal = [log("printed\n"), result([1, "a"])]
    assert cli.main(["exec", SESSION[:3], "x"]) == 0
    assert capsys.readouterr().out == "printed\n[1, 'a']\n"
    assert "DeleteSession" not in daemon.names()


def test_ls_lists_the_files_of_a_directory(daemon: FakeDaemon, capsys: Captured) -> None:
    assert cli.main(["ls", f"{SESSION[:3]}:out"]) == 0
    assert dict(daemon.requests)["ListFiles"].path == "out"
    assert capsys.readouterr().out.splitlines()[0].split() == ["SIZE", "MODIFIED", "PATH"]
    assert cli.main(["ls", "none"]) == 2


def test_rm_ends_what_is_named_or_all_or_nothing(daemon: FakeDaemon, capsys: Captured) -> None:
    daemon.sessions = [types.Session(session_id=name, state=types.SESSION_STATE_IDLE) for name in ("ab1", "ab2", "c")]
    for wrong in (["rm"], ["rm", "--all", "c"], ["rm", "c", "d"], ["rm", "ab"]):
        assert cli.main(wrong) == 2
    assert "DeleteSession" not in daemon.names()
    assert cli.main(["rm", "c", "ab1"]) == 0
    assert cli.main(["rm", "--all"]) == 0
    assert daemon.names().count("DeleteSession") == 5
    daemon.refusals["GetSession"].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"))
    assert cli.main(["rm", "c"]) == 0, "it has ended meanwhile"


def test_repl_has_words_of_its_own(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    typed = [
        "help",
        "help(f)",
        "%import os, numpy.*",
        f"%put {tmp_path}/f",
        "%ls",
        "%session",
        "%put",
        "exit()",
        "1",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    assert cli.main(["repl"]) == 0
    requests = dict(daemon.requests)
    assert list(requests["AuthorizeImports"].authorized_imports) == ["os", "numpy.*"]
    assert "getattr(f, '__doc__', None)" in requests["Execute"].code
    assert daemon.files == {"f": b"x"} and daemon.names().count("Execute") == 1
    out, err = capsys.readouterr()
    assert "%import A, B.*" in out and SESSION in out
    assert "write %put FILE [PATH]" in err


def test_what_is_refused_in_the_repl_does_not_end_it(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("%import os\n%get a\n1\n"))
    listed = types.Violations(violations=[types.Violation(field="authorized_imports", requested="os", allowed="math")])
    refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION", more=(listed,))
    daemon.refusals["AuthorizeImports"].append(refusal)
    daemon.refusals["GetFile"].append(Refusal(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND"))
    assert cli.main(["repl", "--imports", "math"]) == 0
    assert daemon.names().count("Execute") == 1
    assert "authorized_imports: asked for os, allowed is math" in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: Captured) -> None:
    assert cli.main([]) == 2
    assert "executor run script.py" in capsys.readouterr().out


def test_ps_lists_sessions_one_a_line(daemon: FakeDaemon, capsys: Captured) -> None:
    assert cli.main(["ps", "--wide"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["SESSION", "NAME", "STATE", "IMAGE", "EXPIRES", "BACKEND"]
    assert row[header.index("NETWORK") :].startswith("pypi.org:443  ")
    assert row[header.index("MOVED") :].startswith("1,234 B  ")
    assert row.split()[:5] == [SESSION[:12], "-", "idle", "base", "in"] and row.endswith("team=a\\x1b[31m")


def test_version_is_the_distributions(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip()[0].isdigit()


@pytest.mark.parametrize("command", [["ps"], ["ls", SESSION], ["policy"]])
def test_lists_come_as_json_with_all_that_is_known(daemon: FakeDaemon, capsys: Captured, command: list[str]) -> None:
    daemon.policy.images.append("\x1b[2J")
    assert cli.main([*command, "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) and "\x1b" not in out


def test_ps_shows_few_columns_unless_asked_for_all(daemon: FakeDaemon, capsys: Captured) -> None:
    assert cli.main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["SESSION", "NAME", "STATE", "IMAGE", "EXPIRES"]
    assert cli.main(["ps", "--wide"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[-1] == "LABELS"


def test_a_repl_with_a_name_leaves_its_session(
    daemon: FakeDaemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n"))
    assert cli.main(["repl", "--imports", "math", "--name", "analysis"]) == 0
    assert dict(daemon.requests)["CreateSession"].name == "analysis"
    assert "DeleteSession" not in daemon.names()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["executor", "rep"], ["repl", "replay"]),
        (["executor", "run", "--save-s"], ["--save-state"]),
        (["executor", "--to"], ["--token"]),
        (["executor", "env", "b"], ["build"]),
    ],
)
def test_a_shell_completes_commands_and_their_options(capsys: Captured, words: list[str], found: list[str]) -> None:
    assert cli.main(["completion"]) == 0
    script = capsys.readouterr().out
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _executor; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_and_their_options(capsys: Captured, tmp_path: Path) -> None:
    assert cli.main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    asks = "; ".join(f"complete -C 'executor {line}'" for line in ("rep", "run --save-s", "env b"))
    command = ["fish", "-N", "-c", f"{script}\n{asks}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["repl", "replay", "--save-state", "build"]


def test_fish_gets_each_command_and_option_with_its_help(capsys: Captured) -> None:
    assert cli.main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c executor -n '") and line.endswith("'") for line in lines)
    assert "complete -c executor -n '__fish_seen_subcommand_from run' -l put -d '" in "\n".join(lines)
