"""A valid new policy replaces the policy in force; any other change of its file changes nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from executor_server.core.config.key_types import ConfigError
from executor_server.core.config.toml_file import read_bytes
from executor_server.policy import in_force
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile
from executor_server.policy.in_force import PolicyListener, PolicyStore
from tests.support.polling import eventually_async

FIRST = 'version = "1"\ndefault = "all"\n[profiles.all]\n'
SECOND = FIRST.replace('"1"', '"2"')


class Heard(PolicyListener):
    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.unchanged = 0
        self.refusals: list[tuple[str, Sequence[str]]] = []

    def policy_changed(self, before: Policy, now: Policy) -> None:
        self.changes.append((before.version, now.version))

    def policy_unchanged(self) -> None:
        self.unchanged += 1

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        self.refusals.append((current.version, problems))


def make(file: PolicyFile) -> Policy:
    if file.version == "unservable":
        raise ConfigError(["pool.warm.0: no session could get this"])
    return Policy(file, images=["base"], backend="local", orphan_time_s=60.0)


class Bench:
    """A store on a file, watched without a pause."""

    def __init__(self, path: Path, interval_s: float = 0.001) -> None:
        self.path = path
        self.heard = Heard()
        self.path.write_text(FIRST)
        self.store = PolicyStore(path, make, interval_s, self.heard)

    @property
    def version(self) -> str:
        return self.store.current.version

    def replace(self, text: str) -> None:
        """Writes a new file and renames it, as editors and configuration managers do."""
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        beside.rename(self.path)

    async def comes_to_be(self, version: str) -> bool:
        return bool(await eventually_async(lambda: self.version == version))

    async def refuses(self, count: int = 1) -> bool:
        return bool(await eventually_async(lambda: len(self.heard.refusals) >= count))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_force, "SETTLE_S", 0.005)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "policy.toml")
    yield bench
    await bench.store.close()


@pytest.fixture
async def watched(bench: Bench) -> Bench:
    await bench.store.start()
    return bench


# -- asked for


async def test_another_content_takes_the_place_of_the_first(bench: Bench) -> None:
    bench.replace(SECOND)
    assert await bench.store.reload()
    assert bench.version == "2"
    assert bench.heard.changes == [("1", "2")]


async def test_what_says_the_same_in_other_words_changes_nothing(bench: Bench) -> None:
    before = bench.store.current
    bench.replace("# the same\n" + FIRST)
    assert not await bench.store.reload()
    assert bench.store.current is before
    assert (bench.heard.changes, bench.heard.unchanged) == ([], 1)


@pytest.mark.parametrize(
    "text", ["", "version = ", 'default = "nobody"\n[profiles.all]\n', FIRST.replace('"1"', '"unservable"')]
)
async def test_what_cannot_be_used_changes_nothing_and_is_said(bench: Bench, text: str) -> None:
    bench.replace(text)
    with pytest.raises(ConfigError) as refused:
        await bench.store.reload()
    assert bench.version == "1"
    assert bench.heard.refusals == [("1", refused.value.problems)]


async def test_a_daemon_does_not_start_with_what_it_cannot_use(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("nonsense")
    with pytest.raises(ConfigError):
        PolicyStore(path, make, 1.0)


async def test_a_file_that_is_gone_or_none_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.path.unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        await bench.store.reload()
    bench.path.mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        await bench.store.reload()
    assert bench.version == "1"


async def test_the_built_in_policy_has_nothing_to_read(tmp_path: Path) -> None:
    store = PolicyStore(None, make, 0.001)
    await store.start()
    before = store.current
    assert not await store.reload()
    store.reload_soon()
    assert store.current is before
    await store.close()


async def test_readings_that_are_asked_for_together_take_turns(bench: Bench) -> None:
    bench.replace(SECOND)
    assert sorted(await asyncio.gather(*(bench.store.reload() for _ in range(5)))) == [False] * 4 + [True]


async def test_who_asks_and_goes_away_takes_nothing_along(bench: Bench) -> None:
    bench.replace(SECOND)
    asked = asyncio.create_task(bench.store.reload())
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await bench.store.start()
    assert await bench.comes_to_be("2")


# -- watched


WHEEL = f'wheels = [{{ url = "https://a.example/x-1-py3-none-any.whl", hashes = {{ sha256 = "{"ab" * 32}" }} }}]'
LOCK = f'lock-version = "1.0"\ncreated-by = "uv"\n[[packages]]\nname = "x"\nversion = "1"\n{WHEEL}\n'


async def test_a_lock_that_changes_is_another_policy(watched: Bench, tmp_path: Path) -> None:
    lock = tmp_path / "pylock.toml"
    lock.write_text(LOCK)
    watched.replace(SECOND + f"packages.lock = '{lock}'\n")
    assert await watched.comes_to_be("2")
    before = watched.store.current.fingerprint
    lock.write_text(LOCK + "# another content\n")
    assert await eventually_async(lambda: watched.store.current.fingerprint != before)
    lock.write_text("nonsense")
    assert await watched.refuses()
    assert watched.version == "2", "the policy before it stays in force"
    lock.write_text(LOCK)
    assert await eventually_async(lambda: watched.store.current.fingerprint == before)


@pytest.mark.parametrize("content", [None, "nonsense"])
async def test_a_policy_that_was_refused_for_its_lock_is_read_again_when_that_is_repaired(
    watched: Bench, tmp_path: Path, content: str | None
) -> None:
    """Only the locks of the policy in force were watched."""
    lock = tmp_path / "pylock.toml"
    if content is not None:
        lock.write_text(content)
    watched.replace(SECOND + f"packages.lock = '{lock}'\n")
    assert await watched.refuses()
    lock.write_text(LOCK)
    assert await watched.comes_to_be("2")


async def test_a_policy_that_was_refused_for_the_directory_of_its_lock_is_read_again_when_that_is_repaired(
    watched: Bench, tmp_path: Path
) -> None:
    lock = tmp_path / "locks/pylock.toml"
    lock.parent.mkdir()
    lock.parent.chmod(0o777)
    lock.write_text(LOCK)
    watched.replace(SECOND + f"packages.lock = '{lock}'\n")
    assert await watched.refuses()
    lock.parent.chmod(0o755)
    assert await watched.comes_to_be("2")


async def test_a_file_that_is_replaced_or_written_over_is_noticed(watched: Bench) -> None:
    watched.replace(SECOND)
    assert await watched.comes_to_be("2")
    watched.path.write_text(FIRST.replace('"1"', '"3"'))
    assert await watched.comes_to_be("3")


async def test_a_link_that_comes_to_lead_elsewhere_is_noticed(tmp_path: Path) -> None:
    """A mounted configuration map changes like this: `..data` is swapped, and the file's own link stays as it is."""
    for name, text in (("v1", FIRST), ("v2", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.toml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "policy.toml").symlink_to("..data/policy.toml")
    store = PolicyStore(tmp_path / "policy.toml", make, 0.001)
    await store.start()
    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert await eventually_async(lambda: store.current.version == "2")
    await store.close()


async def test_a_signal_has_the_file_read_at_once(bench: Bench) -> None:
    bench.store = PolicyStore(bench.path, make, 3600.0, bench.heard)
    await bench.store.start()
    bench.replace(SECOND)
    bench.store.reload_soon()
    assert await bench.comes_to_be("2")
    bench.store.reload_soon()
    assert await eventually_async(lambda: bench.heard.unchanged == 1)


async def test_a_file_in_the_middle_of_a_write_is_not_taken_though_it_is_valid(bench: Bench, monkeypatch: Any) -> None:
    """The file's beginning has no tenants: with `on_reload = "end"` that would end all their sessions."""
    monkeypatch.setattr(in_force, "SETTLE_S", 0.05)
    with bench.path.open("w") as file:
        file.write(SECOND)
        file.flush()
        await bench.store.start()
        read = threading.Event()

        def reading(path: Path, kind: str) -> bytes:
            data = read_bytes(path, kind)
            read.set()
            return data

        monkeypatch.setattr(in_force, "read_trusted", reading)
        assert await asyncio.to_thread(read.wait, 10.0)
        file.write('[tenants.a]\nprofile = "all"\n')
    assert await bench.comes_to_be("2")
    assert bench.store.current.lists("a")
    assert bench.heard.changes == [("1", "2")], "the beginning of it was in force for a while"


async def test_what_cannot_be_used_is_complained_of_once_and_again_when_it_is_another(watched: Bench) -> None:
    with capture_logs() as logs:
        watched.path.write_text("version = ")
        assert await watched.refuses()
        os.utime(watched.path)  # looked at again, and found to be the same
        watched.replace("version = ")
        watched.path.write_text("default = ")
        assert await watched.refuses(2)
    assert len(watched.heard.refusals) == 2
    loud = [log for log in logs if log["event"] == "policy_refused"]
    assert [log["log_level"] for log in loud] == ["error", "error"]
    watched.replace(SECOND)
    assert await watched.comes_to_be("2")


async def test_a_pipe_in_its_place_hangs_nothing(watched: Bench) -> None:
    watched.path.unlink()
    os.mkfifo(watched.path)
    assert await eventually_async(lambda: any("regular" in problems[0] for _, problems in watched.heard.refusals))
    watched.replace(SECOND)
    assert await watched.comes_to_be("2")


async def test_a_file_that_never_stands_still_is_given_up_and_looked_at_again(
    watched: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = iter(range(10**9))
    monkeypatch.setattr(in_force, "_signature", lambda _: (next(signatures),))
    assert await watched.refuses()
    assert "keeps changing" in watched.heard.refusals[0][1][0]
    monkeypatch.undo()
    watched.replace(SECOND)
    assert await watched.comes_to_be("2")


async def test_a_file_that_could_not_be_read_is_tried_again_though_it_has_not_changed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, kind: str) -> bytes:
        raise ConfigError(["The policy file can't be read: Too many open files."])

    bench.replace(SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(in_force, "read_trusted", refuse)
        await bench.store.start()
        assert await bench.refuses()
    assert await bench.comes_to_be("2")
    assert len(bench.heard.refusals) == 1


async def test_a_bug_in_reading_does_not_end_the_watch(watched: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()

    def parse(data: bytes, path: Path) -> PolicyFile:
        broken.set()
        raise AssertionError("a bug")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(in_force, "parse_policy", parse)
        watched.replace(SECOND)
        assert await eventually_async(lambda: any(log["event"] == "policy_watch_broke" for log in logs))
    watched.replace(SECOND + "\n")
    assert await watched.comes_to_be("2")
