"""Sessions with names and with environment variables, as clients use them."""

from __future__ import annotations

import os

import pytest

from executor_client import ExecutorClient, InvalidRequest, NotFoundError, PreconditionError
from tests.support.daemon import Daemon
from tests.support.fork_server import EXECUTOR, run


def test_a_named_session_is_made_once_and_found_by_another_client(daemon: Daemon) -> None:
    with daemon.client() as first:
        session = first.session("analysis", authorized_imports=["os"])
        assert session.name == "analysis" and session.info.detached
        session.execute("kept = 41")
    with daemon.client() as second:
        again = second.session("analysis")
        assert again.session_id == session.session_id
        assert again.execute("kept + 1").output == 42
        assert [info.name for info in second.list_sessions()] == ["analysis"]
        again.close()
        with pytest.raises(NotFoundError):
            second.get_session(name="analysis")


def test_a_name_belongs_to_one_session(client: ExecutorClient) -> None:
    with client.create_session(name="one") as one, client.create_session(name="two") as two:
        for attempt in (lambda: client.create_session(name="one"), lambda: two.rename("one")):
            with pytest.raises(PreconditionError) as refused:
                attempt()
            assert refused.value.reason == "NAME_TAKEN"
        assert one.rename("other").name == "other"
        assert two.rename("one").name == "one"
        assert client.get_session(name="one").session_id == two.session_id
        assert two.rename("").name == ""
    with pytest.raises(InvalidRequest, match="name"):
        client.create_session(name="no name")
    with pytest.raises(InvalidRequest):
        client.get_session()


def test_variables_of_the_session_reach_its_interpreters_and_its_processes(client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["os"], env={"TOKEN": "geheim", "WORD": "one"}) as session:
        assert session.info.env_names == ("TOKEN", "WORD")
        assert "geheim" not in repr(session.info)
        assert session.execute("import os\nos.environ['TOKEN']").output == "geheim"
        assert session.processes.run("echo $TOKEN $WORD").stdout == "geheim one\n"
        assert session.processes.run("echo $WORD", env={"WORD": "two"}).stdout == "two\n"
        assert session.execute("os._exit(1)").state.value == "reset"
        assert session.execute("import os\nos.environ['TOKEN']").output == "geheim"
    for wrong in ({"1A": "x"}, {"A": "x\0y"}, {f"A{n}": "" for n in range(65)}, {"A": "x" * 70_000}):
        with pytest.raises(InvalidRequest) as refused:
            client.create_session(env=wrong)
        assert "x\0y" not in str(refused.value) and "xxxx" not in str(refused.value)


STARTED_WITH = """\
import datetime, locale, os, sys, time, warnings
import numpy
with warnings.catch_warnings(record=True) as caught:
    warnings.warn("x", DeprecationWarning)
report = [
    hash("abc"), time.tzname[0], datetime.datetime(2026, 1, 1).astimezone().isoformat(), sys.path[0],
    "error::UserWarning" in sys.warnoptions, locale.setlocale(locale.LC_CTYPE), sys.flags.dev_mode,
]
report
"""
AT_THE_START = {
    "TZ": "UTC-2",
    "PYTHONPATH": "/workspace/own",
    "PYTHONWARNINGS": "error::UserWarning",
    "PYTHONHASHSEED": "5",
    "PYTHONDEVMODE": "1",
    "LC_ALL": "POSIX",
    "OMP_NUM_THREADS": "1",
}


def test_an_interpreter_starts_with_the_variables_of_its_session(client: ExecutorClient) -> None:
    """Python and its libraries read these once, and an interpreter is a fork of a process that has read them."""
    with client.create_session(authorized_imports=["*"], env=AT_THE_START) as session:
        session.put_file("own/mine.py", b"HERE = 1")
        first = session.execute(STARTED_WITH)
        assert first.output[1:] == ["UTC", "2026-01-01T00:00:00+02:00", "/workspace/own", True, "C", True], first.error
        alone = session.processes.run(["python", "-c", "print(hash('abc'))"])
        assert first.output[0] == int(alone.stdout)
        assert session.execute("import mine; mine.HERE").output == 1
        assert session.execute("os._exit(1)").state.value == "reset"
        assert session.execute(STARTED_WITH).output == first.output
        session.savepoint()
        session.execute("report = 0")
        session.rollback()
        assert session.execute("report[0]").output == first.output[0]


def test_a_time_zone_alone_holds_from_the_first_execution_on(client: ExecutorClient) -> None:
    with client.create_session(env={"TZ": "Europe/Riga"}) as session:
        assert session.execute("import time; time.tzname").output == ("EET", "EEST")


def test_libraries_read_their_variables_though_they_were_imported_ahead(client: ExecutorClient) -> None:
    with client.create_session(
        authorized_imports=["*"], env={"MPLBACKEND": "svg", "MPLCONFIGDIR": "/tmp/m"}
    ) as session:
        code = "import matplotlib; [matplotlib.get_backend(), matplotlib.get_configdir()]"
        assert session.execute(code).output == ["svg", "/tmp/m"]


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"PYTHONHASHSEED": "many", "WORD": "x"}, "Python does not start with these variables.*PYTHONHASHSEED, WORD"),
        ({"PYTHONHOME": "/nowhere"}, "Python does not start"),
        ({"TZ": "Europe/Rga"}, "no time zone 'Europe/Rga'"),
    ],
)
def test_variables_that_can_not_be_applied_are_refused(
    client: ExecutorClient, env: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        client.create_session(env=env)


def test_values_are_nowhere_but_in_the_sandbox(daemon: Daemon) -> None:
    """They are in no file of the daemon (audit log, journals and registry among them), in its log, in a list, an error."""
    texts: list[str] = []
    with daemon.client() as client, client.create_session(name="secretive", env={"TOKEN": "geheim-4711"}) as session:
        session.processes.run("true", env={"OTHER": "geheim-4712"})
        process = session.processes.start(["sleep", "1000"], process_id="p", env={"OTHER": "geheim-4713"})
        for refused in (
            lambda: session.processes.start(["sleep", "1000"], process_id="p", env={"OTHER": "geheim-4714"}),
            lambda: session.processes.run(["no-such-command"], env={"OTHER": "geheim-4715"}),
            lambda: session.processes.run("true", cwd="missing", env={"OTHER": "geheim-4716"}),
            lambda: client.create_session(env={"OTHER": "geheim-4717", "1A": "geheim-4718"}),
        ):
            with pytest.raises((InvalidRequest, FileNotFoundError)) as error:
                refused()
            texts.append(repr(error.value) + str(error.value.__cause__))
        for arguments in (["ps", "--full"], ["ps", "--full", "secretive"]):
            environment = {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}
            texts.append(run([*EXECUTOR, *arguments], env=environment, text=True, check=True).stdout)
        assert "sleep 1000" in texts[-1]
        texts += [repr(session.info), repr(session.processes.list()), daemon.log.read_text()]
        assert [text for text in texts if "geheim" in text] == []
        left = [path for path in daemon.state_dir.rglob("*") if path.is_file() and b"geheim-47" in path.read_bytes()]
        assert left == []
        process.kill()
