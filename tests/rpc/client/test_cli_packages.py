"""Packages on the command line: asked for by options, by a script's header, and made before a session needs them."""

from __future__ import annotations

import io
from pathlib import Path

import grpc
import pytest

from executor_api.v1 import types_pb2 as types
from executor_client import cli
from tests.support.fake_daemon import SESSION, TOKEN, FakeDaemon, Refusal, building

Captured = pytest.CaptureFixture[str]
SCRIPT = """\
# /// script
# requires-python = ">=3.11"
# dependencies = ["polars>=1", "numpy"]
# ///
print(1)
"""


@pytest.fixture(autouse=True)
def address(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTOR_ADDRESS", daemon.address)
    monkeypatch.setenv("EXECUTOR_TOKEN", TOKEN)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "s.py").write_text(SCRIPT)
    return str(tmp_path / "s.py")


def asked(daemon: FakeDaemon, method: str) -> list[list[str]]:
    return [list(request.packages) for name, request in daemon.requests if name == method]


def test_packages_of_options_and_header_are_asked_for_and_their_modules_authorized(
    daemon: FakeDaemon, script: str
) -> None:
    assert cli.main(["run", "--imports", "math", "--with", "numpy", "--with", "six", "--image", "data", script]) == 0
    packages = ["numpy", "six", "polars>=1"]
    assert asked(daemon, "PrepareEnvironment") == asked(daemon, "CreateSession") == [packages]
    assert daemon.names() == [
        "PrepareEnvironment",
        "CreateSession",
        "AuthorizeImports",
        "PutFile",
        "Execute",
        "DeleteSession",
    ]
    images = [request.image for name, request in daemon.requests if name in ("PrepareEnvironment", "CreateSession")]
    assert images == ["data", "data"]
    assert list(daemon.requests[2][1].authorized_imports) == ["numpy.*"]


def test_without_packages_no_environment_is_asked_for(daemon: FakeDaemon) -> None:
    assert cli.main(["run", "-c", "1"]) == 0
    assert "PrepareEnvironment" not in daemon.names()


def test_repl_has_packages_too(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["repl", "--with", "six"]) == 0
    assert asked(daemon, "CreateSession") == [["six"]]


def test_modules_that_the_policy_refuses_are_left_out(daemon: FakeDaemon) -> None:
    """The program need not import them; if it does, the refusal says so then."""
    refused = types.Violation(field="authorized_imports", requested="numpy.*", allowed="math", rule="x")
    listed = types.Violations(violations=[refused])
    refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION", more=(listed,))
    daemon.refusals["AuthorizeImports"].append(refusal)
    assert cli.main(["run", "--imports", "math", "--with", "numpy", "-c", "1"]) == 0
    assert daemon.names().count("AuthorizeImports") == 1


def test_a_python_that_the_header_does_not_admit_is_said_before_anything_runs(
    daemon: FakeDaemon, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "s.py").write_text("# /// script\n# requires-python = '>=3.99'\n# ///\nprint()\n")
    assert cli.main(["run", str(tmp_path / "s.py")]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path}/s.py, line 2: the script needs Python >=3.99, but the image 'base' has 3." in err
    assert "Execute" not in daemon.names() and "DeleteSession" in daemon.names()


def test_a_mistake_in_the_header_makes_no_session(daemon: FakeDaemon, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "s.py").write_text("# /// script\n# depends = []\n# ///\n")
    assert cli.main(["run", str(tmp_path / "s.py")]) == 2
    assert f"{tmp_path}/s.py, line 2: unknown key 'depends'" in capsys.readouterr().err
    assert daemon.names() == []


def test_a_session_that_is_there_keeps_its_packages(daemon: FakeDaemon, script: str, capsys: Captured) -> None:
    assert cli.main(["run", "--session", SESSION, "--with", "six", "-c", "1"]) == 2
    assert "--with: not possible for an existing session" in capsys.readouterr().err
    assert cli.main(["run", "--session", SESSION, script]) == 0
    assert "ignored the packages in the script's header" in capsys.readouterr().err
    assert asked(daemon, "PrepareEnvironment") == []


def test_env_build_waits_and_shows_what_was_made(
    daemon: FakeDaemon, tmp_path: Path, script: str, capsys: Captured
) -> None:
    (tmp_path / "requirements.txt").write_text("six\nnumpy --hash=sha256:aa\n")
    daemon.refusals["PrepareEnvironment"] += [building("resolving"), building("installing", 1, 2)]
    files = [str(tmp_path / "requirements.txt"), script]
    assert cli.main(["env", "build", *files, "--with", "six", "--image", "data", "--backend", "local"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "environment  env-1",
        "size         7 bytes",
        "packages     numpy==2.5.5",
    ]
    assert asked(daemon, "PrepareEnvironment") == [["six", "numpy", "polars>=1"]] * 3
    request = daemon.requests[-1][1]
    assert (request.image, request.backend) == ("data", "local")
    assert daemon.names() == ["PrepareEnvironment"] * 3, "it makes no session"


def test_env_build_says_why_it_can_not(daemon: FakeDaemon, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["env", "build"]) == 2
    assert "nothing to build" in capsys.readouterr().err
    (tmp_path / "requirements.txt").write_text("-r other.txt\n")
    assert cli.main(["env", "build", str(tmp_path / "requirements.txt")]) == 2
    assert "requirements.txt, line 1: the option -r can't be used" in capsys.readouterr().err
    why = "no wheel of x 1.0 fits Python 3.11"
    daemon.refusals["PrepareEnvironment"].append(
        Refusal(grpc.StatusCode.FAILED_PRECONDITION, "ENVIRONMENT_FAILED", why)
    )
    assert cli.main(["env", "build", "--with", "x"]) == 2
    assert capsys.readouterr().err == f"executor: {why}\n"
