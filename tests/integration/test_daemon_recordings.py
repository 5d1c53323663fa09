"""Recordings that the daemon makes: like the client's, within their bounds, and for their tenant only."""

from __future__ import annotations

import resource
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_client import (
    NotFoundError,
    PolicyViolationError,
    Recording,
    Session,
    Tool,
)
from executor_client.cli import main
from tests.support.backends import require
from tests.support.blocking import client_of
from tests.support.daemon import Daemon, daemon_of, running_daemon
from tests.support.fleet_daemon import fleet_daemon
from tests.support.fleet_daemon import wanted as fleet_is_wanted
from tests.support.leftovers import DAEMON_PREFIX
from tests.support.polling import eventually

POLICY = """
default = "full"
[profiles.full.record]
mode = "full"
[profiles.events.record]
mode = "events"
redact_tools = ["crm_*"]
[profiles.small.record]
mode = "full"
max_bytes = 50_000
[profiles.unfetched.record]
mode = "full"
fetch = false
[profiles.plain]
[tenants.events]
profile = "events"
[tenants.small]
profile = "small"
[tenants.unfetched]
profile = "unfetched"
[tenants.plain]
profile = "plain"
"""

REMOVED = """
[profiles.brief.record]
mode = "full"
retention_s = 0.01
[profiles.crowded.record]
mode = "full"
total_bytes = 1
[tenants.brief]
profile = "brief"
[tenants.crowded]
profile = "crowded"
"""

TOOLS: dict[str, Any] = {
    "weather": lambda city: {"Paris": 21}[city],
    "large": lambda: "v" * 300_000,
    "crm_find": lambda key: f"secret of {key}",
    "double": Tool(lambda number: number * 2, placement="sandbox"),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with fleet_daemon(policy=POLICY) if fleet_is_wanted() else daemon_of("", policy=POLICY) as running:
        yield running


def fetched(client: Any, session: Any, directory: Path) -> Path:
    path = directory / f"{session.session_id}.rxr"
    client.get_recording(session.session_id, path)
    return path


def use(session: Session) -> None:
    """Does with a session whatever a recording must bring back."""
    session.register_tools(TOOLS)
    session.set_variables({"numbers": list(range(2_000)), "large_text": "t" * 600_000})
    session.files.write("data/a.txt", b"x" * 5_000)
    session.execute("first = weather('Paris')\nprint('it is', first, ANSWER, object())")
    savepoint = session.savepoint()
    session.execute("first = 5\nlen(large())")
    session.rollback(savepoint)
    session.execute("try:\n    weather('Atlantis')\nexcept KeyError as error:\n    print(repr(error))")
    session.execute("[first, double(sum(numbers)), len(open('data/a.txt').read()), len(large_text)]")
    session.execute("open('out.txt', 'w').write('x')\nbytes(range(256)) * 2_000")
    session.execute("1 / 0")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_it_is_like_the_clients_and_runs_again(
    daemon: Daemon, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with client_of(kind, daemon) as client:
        with client.create_session(prelude="ANSWER = 42", labels={"a": "b"}) as session:
            session.record(tmp_path / "client.rxr")
            use(session)
        path = fetched(client, session, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["record", "diff", str(path), str(tmp_path / "client.rxr")]) == 0
    access = ["--address", daemon.address, "--token", daemon.token]
    assert main(["replay", str(path), "--execute", *access]) == 0
    assert "verified: all 6 steps went as recorded" in capsys.readouterr().out
    with Recording(path) as recording, Recording(tmp_path / "client.rxr") as of_client:
        ours, theirs = list(recording.entries()), list(of_client.entries())
        assert [each.kind for each in ours] == [each.kind for each in theirs]
        volatile = {"state", "generation", "create_time", "expire_time", "lost_reason", "network_usage"}
        more = {"missing_modules", "images_with_missing", "detached"}  # they say nothing that a replay needs
        expected = {name: each for name, each in theirs[0].fields.items() if name not in volatile | more}
        assert {name: each for name, each in ours[0].fields.items() if name not in volatile} == expected
        assert recording.manifest.complete and not recording.manifest.unknown
        assert any("messages of the model" in each for each in recording.manifest.referenced)


def test_one_of_a_session_that_goes_on_says_that_it_is_incomplete(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon.client() as client, client.create_session() as session:
        session.execute("1 + 1")
        with Recording(fetched(client, session, tmp_path)) as recording:
            (step,) = recording.steps()
            result = recording.result(step)
            assert result is not None and result.output == 2
            assert not recording.manifest.complete and "had not ended" in recording.manifest.ended
        (info,) = [each for each in client.list_recordings() if each.session_id == session.session_id]
        assert info.end_time is None and info.mode == "full" and info.size_bytes > 100
        path, access = tmp_path / "cli.rxr", ["--address", daemon.address, "--token", daemon.token]
        assert main(["record", "get", session.session_id[:20], "-o", str(path), *access]) == 0
        assert main(["record", "list", *access]) == 0
        assert main(["policy", *access]) == 0
        out = capsys.readouterr().out
        assert "goes on" in out and "by the daemon: full" in out
        assert path.exists()


def test_events_alone_have_no_variables_no_files_and_nothing_of_redacted_tools(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client_of("events") as client:
        with client.create_session() as session:
            session.register_tools(TOOLS)
            session.set_variables({"small": "hidden value", "big": "hidden value" * 50_000})
            session.files.write("a.txt", b"hidden value" * 500)
            session.execute("print(weather('Paris'), len(crm_find('key')))")
        path = fetched(client, session, tmp_path)
    with zipfile.ZipFile(path) as zipped:
        contents = [zipped.read(name) for name in zipped.namelist()]
    assert not any(b"hidden value" in each or b"secret of" in each for each in contents)
    with Recording(path) as recording:
        assert recording.manifest.redacted_tools == ("crm_*",)
        assert recording.manifest.unknown == {
            "variables that the client set": 1,
            "contents of files that the client put": 1,
            "calls of redacted tools": 1,
        }
        (step,) = recording.steps()
        result = recording.result(step)
        assert result is not None and result.stdout == "21 13\n"


def test_at_its_limit_it_ends_and_the_session_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client_of("small") as client:
        with client.create_session() as session:
            session.execute("'first'")
            assert len(session.execute("bytes(100_000)").output) == 100_000
            assert session.execute("3").output == 3
        path = fetched(client, session, tmp_path)
    with Recording(path) as recording:
        assert recording.manifest.ended == "it reached its limit of 50,000 bytes"
        assert [step.request.code for step in recording.steps()][:1] == ["'first'"]


def test_a_recording_is_for_its_tenant_as_far_as_the_policy_says_and_for_administrators(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "stolen.rxr"
    with daemon.client_of("unfetched") as owner, daemon.client_of("plain") as other:
        with owner.create_session() as session:
            session.execute("1")
        with other.create_session() as unrecorded:
            unrecorded.execute("1")
        for client, session_id in ((other, session.session_id), (other, unrecorded.session_id), (other, "none")):
            with pytest.raises(NotFoundError, match="there is no"):
                client.get_recording(session_id, path)
        assert other.list_recordings() == []
        with pytest.raises(PolicyViolationError, match=r"record\.fetch"):
            owner.get_recording(session.session_id, path)
        assert [each.session_id for each in owner.list_recordings()] == [session.session_id]
    assert not list(tmp_path.iterdir())
    with daemon.client() as administrator:
        administrator.get_recording(session.session_id, path)
    with Recording(path) as recording:
        assert len(list(recording.steps())) == 1


def test_a_disk_that_fails_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    require("local")
    with daemon_of("", policy=POLICY) as daemon, daemon.client() as client:
        with client.create_session() as session:
            session.execute("print('before')")
            client.get_recording(session.session_id, tmp_path / "before.rxr")  # so that this is on the disk
            _, most = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (200_000, most))
            assert len(session.execute("bytes(1_000_000)").output) == 1_000_000
            assert session.execute("2").output == 2
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (most, most))
        with Recording(fetched(client, session, tmp_path)) as recording:
            assert "could not be written: File too large" in recording.manifest.ended
            assert next(recording.steps()).request.code == "print('before')"

        with client.create_session() as session:
            session.execute("print('before')")
            session.execute("2")
        client.get_recording(session.session_id, tmp_path / "whole.rxr")
        entries = daemon.state_dir / "recordings" / session.session_id / "entries"
        stored = bytearray(entries.read_bytes())
        stored[-20] ^= 1
        entries.write_bytes(stored)
        with Recording(fetched(client, session, tmp_path)) as recording:
            assert "damaged" in recording.manifest.ended
            first, second = recording.steps()
            assert first.is_ended and not second.is_ended


def test_the_next_daemon_goes_on_with_it_and_removes_old_ones(tmp_path: Path) -> None:
    require("local")
    with tempfile.TemporaryDirectory(prefix=DAEMON_PREFIX) as name:
        directory = Path(name)
        (directory / "policy.toml").write_text(POLICY + REMOVED)
        (directory / "config.toml").write_text(f'policy.file = "{directory}/policy.toml"\n')
        options = ("--config", str(directory / "config.toml"))
        with running_daemon(directory, *options) as daemon, daemon.client() as client:
            gone = set()
            for tenant in ("brief", "crowded"):
                with daemon.client_of(tenant) as short_lived, short_lived.create_session() as removed:
                    removed.execute("1")
                    gone.add(removed.session_id)
            session = client.create_session(detached=True)
            session.execute("print('before')")
            results: list[Any] = []
            begun = threading.Event()
            program = "print('begun')\nimport time\ntime.sleep(1)\nbytes(300_000)"

            def run() -> None:
                results.append(session.execute(program, on_event=lambda _: begun.set()))

            running = threading.Thread(target=run)
            running.start()
            assert begun.wait(30)
            client.get_recording(session.session_id, tmp_path / "first.rxr")  # so that all of it is on the disk
            daemon.kill()
            with running_daemon(directory, *options) as second, second.client() as again:
                running.join(30)
                assert len(results[0].output) == 300_000
                assert again.get_session(session.session_id).execute("4").output == 4
                assert eventually(lambda: not gone & {each.session_id for each in again.list_recordings()})
                again.get_session(session.session_id).close()
                with Recording(fetched(again, session, tmp_path)) as recording:
                    ended = [recording.result(step) for step in recording.steps()]
                    assert [each.outcome.value for each in ended if each is not None] == ["succeeded"] * 3
                    assert ended[1] is not None and ended[1].stdout == "begun\n"
                    assert recording.manifest.unknown == {"what happened while the daemon was restarted": 1}


def test_one_that_a_killed_daemon_had_not_begun_is_begun_by_the_next_one(tmp_path: Path) -> None:
    """The registry has a session before its recording has a file: then it was not recorded, and nothing said so."""
    require("local")

    def remove_entries(recording: Path) -> None:
        (recording / "entries").unlink()

    def leave_directory(recording: Path) -> None:
        shutil.rmtree(recording)
        recording.mkdir(mode=0o700)

    def damage_description(recording: Path) -> None:
        (recording / "about.json").write_bytes(b"")

    with tempfile.TemporaryDirectory(prefix=DAEMON_PREFIX) as name:
        directory = Path(name)
        (directory / "policy.toml").write_text(POLICY)
        (directory / "config.toml").write_text(f'policy.file = "{directory}/policy.toml"\n')
        options = ("--config", str(directory / "config.toml"))
        with running_daemon(directory, *options) as daemon, daemon.client() as client:
            leave: list[Callable[[Path], None]]
            leave = [shutil.rmtree, leave_directory, remove_entries, damage_description]
            sessions = [client.create_session(detached=True) for _ in leave]
            for session in sessions:
                fetched(client, session, tmp_path).unlink()  # so that all of it is on the disk
            daemon.kill()
            for leave_it, session in zip(leave, sessions, strict=True):
                leave_it(daemon.state_dir / "recordings" / session.session_id)
            with running_daemon(directory, *options) as second, second.client() as again:
                for leave_it, session in zip(leave, sessions, strict=True):
                    assert again.get_session(session.session_id).execute("4").output == 4
                    again.get_session(session.session_id).close()
                    with Recording(fetched(again, session, tmp_path)) as recording:
                        assert next(recording.entries()).kind == "session"
                        (step,) = recording.steps()
                        assert step.request.code == "4"
                        when = "while" if leave_it is damage_description else "before"
                        assert recording.manifest.unknown == {f"what happened {when} the daemon was restarted": 1}
                assert second.log.read_text().count("recording_begun_late") == 3
