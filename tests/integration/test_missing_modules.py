"""Modules that are authorized and not in the image: a plain client gets their names, an agent's author
is refused before the model is asked."""

from __future__ import annotations

import logging

import pytest
from smolagents.local_python_executor import InterpreterError

from executor_client import ExecutorClient
from executor_client.smolagents import RemoteExecutor
from tests.support.daemon import Daemon

LACKING = "no_such_module_of_anybody"


def test_a_plain_client_is_told_once_and_goes_on(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    imports = ["math", f"{LACKING}.*", "os.path"]
    with ExecutorClient(daemon.address, token=daemon.token) as client, caplog.at_level(logging.WARNING):
        for _ in range(2):
            with client.create_session(authorized_imports=imports) as session:
                assert session.info.missing_modules == (LACKING,)
                assert session.refresh().missing_modules == (LACKING,)
                assert session.execute("import math\nmath.sqrt(4)").output == 2.0
    assert caplog.text.count(f"has no {LACKING}") == 1


def test_an_executor_refuses_before_any_code_runs(daemon: Daemon) -> None:
    with ExecutorClient(daemon.address, token=daemon.token) as client:
        executor = RemoteExecutor(["math", f"{LACKING}.sub"], client=client)
        with pytest.raises(InterpreterError) as refused:
            executor.send_tools({})
        assert f"Non-installed authorized modules: {LACKING}." in str(refused.value)
        assert "remove them from the authorized imports" in str(refused.value)
        assert client.list_sessions() == []
        executor.cleanup()


@pytest.mark.parametrize("imports", [["*"], ["os.*", "winreg", "numpy.*"]])
def test_what_is_there_is_not_refused(daemon: Daemon, imports: list[str]) -> None:
    with (
        ExecutorClient(daemon.address, token=daemon.token) as client,
        RemoteExecutor(imports, client=client) as executor,
    ):
        executor.send_tools({})
        assert executor("1 + 1").output == 2


def test_a_module_that_files_bring_is_not_missing(daemon: Daemon) -> None:
    """Nor does the daemon look for a package of that name."""
    helper = {"helper.py": b"def f(): return 3", "pack/__init__.py": b"from .part import x", "pack/part.py": b"x = 4"}
    with (
        ExecutorClient(daemon.address, token=daemon.token) as client,
        RemoteExecutor(["helper", "pack.*"], client=client, files=helper) as executor,
    ):
        executor.send_tools({})
        assert executor("import helper, pack.part\nhelper.f(), pack.x").output == (3, 4)
        (session,) = client.list_sessions()
        assert client.get_session(session.session_id).info.missing_modules == ()
        executor("with open('later.py', 'w') as file: file.write('x = 5')")
        assert executor("from later import x\nx").output == 5
