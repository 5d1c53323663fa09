"""`executor` as a user runs it, against a real daemon."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_client import ExecutorClient, Recording
from executor_client._core.session_base import short_id
from tests.support.daemon import Daemon, running_daemon
from tests.support.fork_server import EXECUTOR, popen
from tests.support.polling import eventually
from tests.support.screen import run_on_terminal

TIMEOUT_S = 60.0
POLICY = """
default = "small"
[profiles.small]
language.preset = "strict"
imports.denied = ["os"]
limits.default = { operations = 1000, wall_time_s = 30.0 }
limits.max = { operations = 1000, wall_time_s = 60.0 }
"""


@pytest.fixture
def environment(daemon: Daemon) -> dict[str, str]:
    """The environment of the daemon's user: the command finds socket and token by itself."""
    return {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}


@contextmanager
def started(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen([*EXECUTOR, *arguments], env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def executor(environment: dict[str, str], *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    with started(environment, *arguments) as process:
        out, err = process.communicate(stdin, TIMEOUT_S)
        return process.returncode, out, err


@pytest.mark.parametrize(
    ("code", "exit_code", "out", "said"),
    [
        ("print('é')", 0, "é\n", ""),
        ("print(1)\n1 / 0", 1, "1\n", "ZeroDivisionError"),
        ("x = (", 1, "", "SyntaxError"),
        ("raise SystemExit('no')", 1, "", "no\n"),
        ("raise SystemExit(7)", 7, "", ""),
        ("raise SystemExit(0)", 0, "", ""),
        ("import time\ntime.sleep(1e6)", 1, "", "executor: timeout"),
        ("import os\nos._exit(4)", 4, "", ""),
    ],
)
def test_run_says_how_the_program_ended(
    environment: dict[str, str], code: str, exit_code: int, out: str, said: str
) -> None:
    code_, out_, err = executor(environment, "run", "--timeout", "1", "-", stdin=code)
    assert (code_, out_) == (exit_code, out)
    assert said in err and "_launch" not in err


def test_run_reads_files_and_saves_images(environment: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "p.py"
    program.write_text("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('drawn')")
    images = tmp_path / "images"
    arguments = ("run", "--save-images", str(images), str(program))
    code, out, err = executor(environment, *arguments)
    assert (code, out) == (0, "drawn\n"), err
    assert (images / "image-1.png").read_bytes().startswith(b"\x89PNG")
    assert f"[saved {images / 'image-1.png'}]" in err


def test_run_shows_output_before_the_program_ends(environment: dict[str, str], client: ExecutorClient) -> None:
    code = "import time\nprint('first', flush=True)\ntime.sleep(1e6)"
    with started(environment, "run", "-") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(code)
        process.stdin.close()
        assert process.stdout.readline() == "first\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert process.stderr is not None and process.stderr.read() == "executor: interrupted\n"
    assert client.list_sessions() == [], "an interrupted run leaves no session"


def test_run_that_is_terminated_ends_its_session(environment: dict[str, str], client: ExecutorClient) -> None:
    with started(environment, "run", "-c", "import time\nprint('first', flush=True)\ntime.sleep(1e6)") as process:
        assert process.stdout is not None and process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert client.list_sessions() == []


def test_run_shows_no_frame_of_ours_under_a_failed_import(environment: dict[str, str]) -> None:
    code, _, err = executor(environment, "run", "-c", "import nosuch")
    assert (code, err.count("  File ")) == (1, 1), err


def test_run_shows_what_a_strict_policy_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("c")
    (directory / "p.toml").write_text(POLICY)
    (directory / "c.toml").write_text(f'policy.file = "{directory}/p.toml"\n')
    with running_daemon(directory, "--config", str(directory / "c.toml")) as daemon:
        environment = {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}
        code, out, err = executor(environment, "run", "-", stdin="for i in range(900): pass\nprint(i)")
        assert (code, out) == (0, "899\n")
        assert "operations are used up]" in err and err.startswith("[warning: ")
        code, out, err = executor(environment, "run", "-", stdin="print(().__class__)")
        assert (code, out) == (1, "")
        assert "executor: policy denied\n" in err and "__class__" in err
        code, out, err = executor(environment, "run", "--imports", "os", "--timeout", "99", "-", stdin="1")
        assert (code, out) == (2, "")
        _, limit, imports = err.splitlines()
        assert limit.startswith("  limits.wall_time_s: asked for 99, ")
        assert imports.startswith("  authorized_imports: asked for os, ")


def test_repl_keeps_variables_and_survives_an_interrupt(environment: dict[str, str], client: ExecutorClient) -> None:
    with started(environment, "repl") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("x = 20\nimport time; print('here', flush=True); time.sleep(1e6)\n")
        process.stdin.flush()
        while "here" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("x * 2 + 2\n1 / 0\n", TIMEOUT_S)
    assert process.returncode == 0
    assert "42\n" in out
    assert "executor: cancelled\n" in err and "ZeroDivisionError" in err
    assert client.list_sessions() == []


def test_cp_copies_files_and_directories_both_ways(
    environment: dict[str, str], client: ExecutorClient, tmp_path: Path
) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").write_text("content")
    with client.create_session(authorized_imports=["os"]) as session:
        there = short_id(session.session_id, 12)

        def cp(source: str, target: str) -> tuple[int, str, str]:
            return executor(environment, "cp", source, target)

        assert cp(str(tmp_path / "d"), f"{there}:new") == (0, "", "")
        assert cp(str(tmp_path / "d"), f"{there}:new") == (0, "", "")
        assert cp(str(tmp_path / "d/e/f"), f"{there}:") == (0, "", "")
        assert [file.path for file in session.list_files() if not file.is_directory] == ["f", "new/d/e/f", "new/e/f"]
        assert cp(f"{tmp_path}/d/.", f"{there}:new") == (0, "", "")  # the contents without the directory itself
        assert [file.path for file in session.list_files("new") if not file.is_directory] == ["new/d/e/f", "new/e/f"]
        assert cp(f"{there}:new", str(tmp_path)) == (0, "", "")
        (tmp_path / "into").mkdir()
        assert cp(f"{there}:new/e/.", str(tmp_path / "into")) == (0, "", "")
        assert (tmp_path / "into/f").read_text() == "content"
        code, _, err = cp(f"{there}:f", f"{tmp_path}/none/")  # the slash means a directory
        assert (code, f"{tmp_path}/none/f" in err, (tmp_path / "none").exists()) == (2, True, False)
        assert cp(f"{there}:new/e/f", str(tmp_path / "g")) == (0, "", "")
        assert (tmp_path / "new/d/e/f").read_text() == (tmp_path / "g").read_text() == "content"
        session.execute("import os\nos.symlink('/dev/null', 'link')")
        for source, said in (
            ("link", "not a regular file"),
            ("missing", "there is no 'missing'"),
            ("../x", "there is no '../x'"),
        ):
            code, out, err = cp(f"{there}:{source}", str(tmp_path / "no"))
            assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1
        assert not (tmp_path / "no").exists()


def test_artifacts_have_together_what_the_disk_of_the_sandbox_holds(
    environment: dict[str, str], client: ExecutorClient, tmp_path: Path
) -> None:
    """Hard links and sparse files have far more: a program that used 20 MB made 1.4 GB here."""
    megabyte = 1 << 20
    with client.create_session(limits={"disk_bytes": 4 * megabyte}, authorized_imports=["os"]) as session:
        run = ("run", "--session", session.session_id, "--get-artifacts", str(tmp_path), "-c")
        links = f"open('a', 'wb').write(bytes({megabyte}))\nimport os\nfor n in range(9): os.link('a', f'b{{n}}')"
        code, _, err = executor(environment, *run, f"{links}\nopen('sparse', 'wb').truncate({4 * megabyte})")
        assert (code, sorted(each.name for each in tmp_path.iterdir())) == (0, ["a", "b0", "b1", "b2"]), err
        assert err.count(" was not saved: it has 1,048,576 bytes, and the saved files may have 4,194,304 together") == 6
        assert "'sparse' was not saved: it has 4,194,304 bytes" in err
        notebook = tmp_path / "n.ipynb"
        cells = [{"cell_type": "code", "source": f"open('a', 'wb').write(bytes({3 * megabyte}))"}] * 3
        notebook.write_text(json.dumps({"cells": cells}))
    with client.create_session(limits={"disk_bytes": 4 * megabyte}) as session:
        into = ("--get-artifacts", str(tmp_path / "out"))
        code, _, err = executor(environment, "run", "--session", session.session_id, *into, str(notebook))
        assert (code, "not saved" in err) == (0, False), f"a file that is replaced counts once: {err}"


BIG = "import base64, os\nbig = base64.b64encode(os.urandom(300_000)).decode()\n"
DISPLAYS = "class Page:\n    def _repr_html_(self): return big\ndisplay(Page())"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("cp", "SESSION:big", "DIR/big"), 2, "'DIR/big'"),
        (("cp", "SESSION:dir", "DIR/dir"), 2, "'DIR/dir'"),
        (("run", "--save-state", "DIR/state", "-c", BIG), 2, "'DIR/state'"),
        (("run", "--get-artifacts", "DIR", "-c", f"{BIG}open('made', 'w').write(big)"), 0, "'DIR/made'"),
        (("run", "--save-images", "DIR", "-c", f"{BIG}{DISPLAYS}"), 0, "'DIR/display-1.html'"),
        (("run", "--record", "DIR/r.rxr", "-c", f"{BIG}print(big)"), 0, "the recording DIR/r.rxr failed"),
    ],
    ids=lambda value: value[1].strip("-") if isinstance(value, tuple) else "",
)
def test_a_full_disk_is_reported_with_the_file_and_leaves_nothing_of_it(
    environment: dict[str, str],
    client: ExecutorClient,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    with client.create_session(authorized_imports=["os", "base64"]) as session:
        session.execute(f"{BIG}os.mkdir('dir')\nfor name in ('big', 'dir/big'): open(name, 'w').write(big)")
        placed = [each.replace("DIR", str(tmp_path)).replace("SESSION", session.session_id) for each in arguments]
        # The small disk is a mount in a namespace of its own, which ends with the command.
        script = 'mount -t tmpfs -o size=64k none "$0" && "$@"; code=$?; find "$0" -type f; exit $code'
        command = ["unshare", "-rm", "sh", "-c", script, str(tmp_path), *EXECUTOR, *placed]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == code, done.stderr
    assert str(tmp_path) not in done.stdout, "the partial file is removed"
    assert said.replace("DIR", str(tmp_path)) in done.stderr and "No space left on device" in done.stderr
    assert "choose another place" in done.stderr or "--record" in arguments


def test_one_session_is_gone_on_in_looked_at_and_ended(environment: dict[str, str], client: ExecutorClient) -> None:
    session = client.create_session()
    name = session.session_id[:8]
    assert executor(environment, "exec", name, "x = 6; open('made.txt', 'w').write('12345')")[:2] == (0, "5\n")
    assert executor(environment, "run", "--session", name, "-c", "print(x)")[:2] == (0, "6\n")
    refused = executor(environment, "exec", name, "import os")
    assert refused[0] == 1 and "--imports os" in refused[2]
    assert executor(environment, "run", "--session", name, "--imports", "os", "-c", "import os; print(x)")[:2] == (
        0,
        "6\n",
    )
    assert "os" in session.refresh().authorized_imports
    assert executor(environment, "exec", name, "os.getcwd()")[:2] == (0, "'/workspace'\n"), "it stays authorized"
    assert executor(environment, "ls", name)[1].split()[-1] == "made.txt"
    assert executor(environment, "rm", name) == (0, f"{session.session_id}\n", "")
    assert client.list_sessions() == []


def test_output_cannot_drive_a_terminal_through_a_pipe(environment: dict[str, str]) -> None:
    program = "print('\\x1b[31mred\\x07')"
    command = f"{sys.executable} -m executor_client.cli run -c {shlex.quote(program)} | cat"
    shown = run_on_terminal(["sh", "-c", command], environment, columns=100)
    assert shown.raw == "\\x1b[31mred\\x07\r\n"


def test_help_needs_nothing_that_takes_time(environment: dict[str, str]) -> None:
    program = (
        "import sys\nfrom executor_client.cli import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    print(sorted({'grpc', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"


def test_run_ends_quietly_when_its_reader_goes(environment: dict[str, str], client: ExecutorClient) -> None:
    """The case of `executor run … | head -1`."""
    with started(environment, "run", "-") as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write("import time\nwhile True:\n    print('y' * 1000, flush=True)\n    time.sleep(0.01)")
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr.read() == ""
    assert eventually(lambda: client.list_sessions() == [])


def test_a_state_is_saved_and_gone_on_with(environment: dict[str, str], tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    first = executor(environment, "run", "--save-state", state, "-", stdin="x = [1]\ng = (n for n in x)")
    assert first[0] == 0 and "'g' was not saved" in first[2] and "generator" in first[2]
    second = executor(environment, "run", "--state", state, "--save-state", state, "-", stdin="x.append(2)")
    assert second[0] == 0, second
    assert executor(environment, "run", "--state", state, "-", stdin="print(x)")[:2] == (0, "[1, 2]\n")


def test_a_state_that_is_none_or_cannot_be_saved_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "none").write_bytes(b"nothing of the kind")
    for arguments in (["--state", str(tmp_path / "none")], ["--state", str(tmp_path / "missing")]):
        code, _, said = executor(environment, "run", *arguments, "-", stdin="print(1)")
        assert code == 2 and ("can't be restored" in said or "cannot be read" in said)
    code, out, said = executor(environment, "run", "--save-state", str(tmp_path), "-", stdin="print(1)")
    assert (code, out) == (2, "1\n") and "was not saved" in said


def test_the_repl_keeps_the_last_value_and_figures(environment: dict[str, str], tmp_path: Path) -> None:
    typed = ["2 * 3", "print('x')", "_ + 1", "(1,", "2)", "_[1]; _[0]", "class A: pass", "A() is _", "_"]
    code, out, _ = executor(environment, "repl", stdin="\n".join([*typed, ""]))
    assert code == 0
    assert out.replace(">>> ", "").replace("... ", "").split("\n") == [
        "6",
        "x",
        "7",
        "(1, 2)",
        "1",
        "False",
        "False",
        "",
    ]
    drawn = f"%images {tmp_path}\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nhelp(len)\n"
    code, out, err = executor(environment, "repl", stdin=drawn)
    assert "Return the number of items in a container." in out
    code, out, err = executor(environment, "repl", stdin="!echo out; echo err >&2\n!exit 3\n1 + 1\n")
    assert (code, out.replace(">>> ", ""), "err\n" in err) == (0, "out\n2\n", True)
    magics = "x = !echo a\nx\n%time x * 2\n%%bash\necho 1\necho 2\n\n%nosuch\n"
    code, out, err = executor(environment, "repl", stdin=magics)
    assert "['a']\n" in out and "Wall time: " in out and "['a', 'a']\n" in out and "1\n2\n" in out
    assert "%nosuch is an IPython magic, which is not available here" in err
    assert (tmp_path / "image-1.png").exists(), err


def test_run_records_the_run_also_when_the_program_fails(environment: dict[str, str], tmp_path: Path) -> None:
    code, _, err = executor(
        environment, "run", "--record", str(tmp_path / "run.rxr"), "-", stdin="print('seen')\n1 / 0"
    )
    assert (code, "ZeroDivisionError" in err) == (1, True)
    with Recording(tmp_path / "run.rxr") as recording:
        (result,) = map(recording.result, recording.steps())
        assert result is not None and result.stdout == "seen\n" and "ZeroDivisionError" in result.stderr
    code, _, err = executor(environment, "run", "--record", str(tmp_path / "none/run.rxr"), "-", stdin="1")
    assert code == 2 and "none/run.rxr can't be written: No such file" in err
