"""The E2B backend makes sandboxes in a cloud, by the real SDK, and leaves nothing of them there.

The cloud is a double whose sandboxes are real ones of this host (tests/support/e2b).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.base import Backend, KnownSandbox
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.backends.e2b import E2BBackend, access, retry, sandbox
from executor_server.backends.e2b.check import examine
from executor_server.backends.e2b.sandbox import E2BSandbox
from executor_server.core.config.backend_config import E2BSection
from executor_server.core.errors import BackendFull, BackendSilent, ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
from tests.contract.harness import Harness, follow
from tests.support.backends import require
from tests.support.polling import eventually_async

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")
from executor_server.backends.e2b.cloud import Machine
from tests.support.e2b import Double, Kind, Template, e2b_section
from tests.support.rounds import usual

MIB = 2**20
SPEC = SandboxSpec("base", memory_bytes=256 * MIB, processes=32, disk_bytes=16 * MIB, orphan_time_s=60.0)
CANARY = "e2b_" + "ca1a21" * 7
_SHOWN: defaultdict[bytes, int] = defaultdict(int)
CREATE, DELETE = "/v2/sandboxes", "/sandboxes/{id}"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    require("e2b")
    directory = Path(tempfile.mkdtemp(prefix="e-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    require("e2b")
    async with Double() as ready:
        yield ready


@asynccontextmanager
async def started(state_dir: Path, section: E2BSection) -> AsyncIterator[E2BBackend]:
    """Provides a backend that has started and adopted, as a daemon's, and closes it at the end."""
    backend = E2BBackend(state_dir, section)
    await backend.start()
    await backend.adopt(())
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture
async def backend(state_dir: Path, double: Double) -> AsyncIterator[E2BBackend]:
    async with started(state_dir, e2b_section(double)) as ready:
        yield ready


async def answers(made: E2BSandbox) -> bool:
    """True when the guest answers. Each call has a daemon id of its own and the tokens that were shown before."""
    channel = GuestChannel(made.endpoint, shown=_SHOWN[made.endpoint.token])
    try:
        await channel.connect(10.0)
    finally:
        _SHOWN[made.endpoint.token] = channel.connections
        channel.close()
    return True


async def machine_of(backend: Backend, cloud_id: str) -> Machine:
    """Returns the machine, for requests as root."""
    assert isinstance(backend, E2BBackend)
    return await backend._started().factory.cloud.connect(cloud_id, lifetime_s=60)


def only(double: Double) -> Any:
    (one,) = double.sandboxes.values()
    return one


# ---------------------------------------------------------------------------------------------------------------------
# Requests to the cloud


async def test_a_sandbox_names_its_daemon_and_reaches_nothing(backend: E2BBackend, double: Double) -> None:
    made = await backend.create(SPEC)
    asked = only(double).asked
    assert asked["allow_internet_access"] is False
    assert asked["envVars"] == {}
    assert asked["timeout"] == 600
    assert asked["metadata"]["executor-sandbox"] == made.sandbox_id
    assert asked["metadata"]["executor-fingerprint"] == made.fingerprint == await backend.fingerprint(SPEC)
    assert set(asked["metadata"]) == {
        "executor-daemon",
        "executor-sandbox",
        "executor-fingerprint",
        "executor-user",
        "executor-guest",
    }
    assert await answers(made)


async def test_the_key_is_in_the_daemon_only(
    state_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the daemon's files and logs nor the sandbox hold it, also after errors."""
    monkeypatch.setenv("E2B_API_KEY", CANARY)
    async with Double(api_key=CANARY) as double:
        async with Harness(E2BBackend(state_dir, e2b_section(double))) as harness:
            session = await harness.session()
            machine = await machine_of(harness.backend, only(double).sandbox_id)
            looking = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; find /opt /run /tmp /root /home -type f | head -50 | xargs cat"
            program = f"({looking}) 2>/dev/null | tr '\\0' '\\n' | grep -c {CANARY[:20]}[{CANARY[20]}] || true"
            assert (await machine.run(program, timeout_s=20)).split() == ["0"]
            double.fault(Kind.STATUS, status=401, times=3)
            double.fault(Kind.GARBAGE, times=3)
            ran = await harness.run(session, "import os\n[*os.environ.values()]")
            assert CANARY not in repr(ran.output)
        for path in ("*", CREATE):
            double.fault(Kind.STATUS, path, status=401, times=None)
            with pytest.raises(SandboxFailure) as raised:
                async with started(state_dir, e2b_section(double)) as backend:
                    await backend.create(SPEC)
            assert CANARY not in str(raised.value)
            double.clear_faults()
    written = capfd.readouterr()
    assert CANARY not in written.out + written.err


async def test_the_daemon_s_environment_does_not_change_the_address(
    backend: E2BBackend, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("E2B_DEBUG", "true"), ("E2B_API_KEY", "e2b_other"), ("E2B_API_URL", "http://127.0.0.1:9")):
        monkeypatch.setenv(name, value)
    await backend.create(SPEC)
    assert len(double.sandboxes) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Failed creations


async def test_a_wrong_key_is_reported_at_the_start(state_dir: Path, double: Double, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(CANARY)
    key.chmod(0o600)
    with pytest.raises(SandboxFailure, match=r"the API key.* is refused") as raised:
        await E2BBackend(state_dir, e2b_section(double, api_key_file=str(key))).start()
    assert CANARY not in str(raised.value)
    assert (await examine(e2b_section(double, api_key_file=str(key))))[-1].ok is False


async def test_a_start_that_failed_leaves_the_state_directory_to_the_next(state_dir: Path, double: Double) -> None:
    double.go_down()
    with pytest.raises(SandboxFailure, match="E2B can't be used"):
        await E2BBackend(state_dir, e2b_section(double)).start()
    double.come_up()
    async with started(state_dir, e2b_section(double)):
        pass


@pytest.mark.parametrize(
    ("template", "message"),
    [("nobody-knows", "E2B does not know: nobody-knows"), ("no-python", "has no Python")],
)
async def test_an_unusable_template_is_named_and_not_paid_for_twice(
    state_dir: Path, double: Double, template: str, message: str
) -> None:
    async with started(state_dir, e2b_section(double, images={"base": template})) as backend:
        with pytest.raises(ImageNotReady, match=message):
            await backend.create(SPEC)
        asked = len(double.requests)
        with pytest.raises(ImageNotReady, match=message):
            await backend.create(SPEC)
        assert len(double.requests) == asked
        assert double.sandboxes == {}


async def test_a_hundred_creations_at_once_do_not_exceed_the_limit(state_dir: Path) -> None:
    async with Double(max_sandboxes=100) as double:
        async with started(state_dir, e2b_section(double, max_sandboxes=5)) as backend:
            results = await asyncio.gather(*(backend.create(SPEC) for _ in range(100)), return_exceptions=True)
            refused = [result for result in results if isinstance(result, BackendFull)]
            made = [result for result in results if isinstance(result, E2BSandbox)]
            assert (len(made), len(refused)) == (5, 95)
            assert all(0 < each.retry_after_s < 60 for each in refused)
            assert len(double.sandboxes) == 5
            await made[0].destroy()
            await backend.create(SPEC)
        assert double.sandboxes == {}


async def test_a_cloud_that_does_not_answer_is_a_silent_backend(backend: E2BBackend, double: Double) -> None:
    double.fault(Kind.CUT_BEFORE, CREATE, method="POST", times=None)
    with pytest.raises(BackendSilent):
        await backend.create(SPEC)


@pytest.mark.parametrize(("kind", "path"), [(Kind.STATUS, CREATE), (Kind.CUT_BEFORE, "/process.Process/Start")])
async def test_a_cloud_that_fails_and_a_machine_that_does_not_answer_are_no_silent_backend(
    backend: E2BBackend, double: Double, kind: Kind, path: str
) -> None:
    """Otherwise one client's request that no machine survives would make the fail-over skip this backend for all."""
    double.fault(kind, path, method="POST", times=None)
    with pytest.raises(SandboxFailure) as failed:
        await backend.create(SPEC)
    assert not isinstance(failed.value, BackendSilent)
    assert double.sandboxes == {}


# ---------------------------------------------------------------------------------------------------------------------
# Answers that are lost or wrong


async def test_a_creation_whose_answer_was_lost_makes_one_sandbox(backend: E2BBackend, double: Double) -> None:
    double.fault(Kind.CUT_AFTER, CREATE)
    made = await backend.create(SPEC)
    assert only(double).sandbox_id == made.cloud_id
    assert double.created == 1


HARMLESS = [Kind.DELAY, Kind.CUT_BEFORE, Kind.CUT_AFTER, Kind.STATUS, Kind.STATUS_AFTER, Kind.TRUNCATED, Kind.GARBAGE]
STEPS = [CREATE, "/files", "/process.Process/Start"]


@pytest.mark.parametrize(
    "kind", usual(HARMLESS, but=set(HARMLESS) - {Kind.CUT_BEFORE, Kind.GARBAGE}), ids=lambda kind: kind.name.lower()
)
async def test_a_creation_survives_a_fault_that_happens_once(backend: E2BBackend, double: Double, kind: Kind) -> None:
    for path in STEPS:
        for skip in (0, 1):
            double.fault(kind, path, method="POST", skip=skip, status=502, seconds=0.05)
            made = await backend.create(SPEC)
            double.clear_faults()
            assert await answers(made), (path, skip)
            assert only(double).sandbox_id == made.cloud_id, (path, skip)
            await made.destroy()


@pytest.mark.parametrize(
    "kind",
    usual([*HARMLESS[1:], Kind.WRONG_ID, Kind.VANISH], but=(Kind.GARBAGE, Kind.TRUNCATED, Kind.CUT_BEFORE)),
    ids=lambda kind: kind.name.lower(),
)
async def test_a_creation_that_never_succeeds_leaves_nothing(backend: E2BBackend, double: Double, kind: Kind) -> None:
    for path in (*STEPS, "*"):
        double.fault(kind, path, method="POST", times=None, status=503)
        try:
            made = await backend.create(SPEC)
        except SandboxFailure:
            double.clear_faults()
            await backend.sweep()
        else:  # a fault without effect on this request
            assert kind is Kind.WRONG_ID or (kind is Kind.VANISH and path == CREATE), path
            double.clear_faults()
            await made.destroy()
        assert double.sandboxes == {}, path


async def test_a_creation_with_stalled_streams_ends_in_time(
    state_dir: Path, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "E2B_REQUEST_TIMEOUT_S", 0.5)
    async with started(state_dir, e2b_section(double)) as backend:
        double.fault(Kind.STREAM_STALL, "/process.Process/Start", times=None)
        with pytest.raises(SandboxFailure):
            async with asyncio.timeout(60.0):  # far from the minutes that all its attempts may take
                await backend.create(SPEC)
        double.clear_faults()
        await backend.sweep()
        assert double.sandboxes == {}


async def test_a_sandbox_that_vanishes_while_it_is_made_says_nothing_of_its_template(
    backend: E2BBackend, double: Double
) -> None:
    double.fault(Kind.VANISH, "/files", times=None)
    with pytest.raises(SandboxFailure) as raised:
        await backend.create(SPEC)
    assert not isinstance(raised.value, ImageNotReady)
    double.clear_faults()
    await backend.create(SPEC)


# ---------------------------------------------------------------------------------------------------------------------
# Broken connections


async def test_a_connection_that_is_cut_is_made_again_and_nothing_is_lost(state_dir: Path, double: Double) -> None:
    async with Harness(E2BBackend(state_dir, e2b_section(double))) as harness:
        session = await harness.session()
        await harness.run(session, "kept = 'kept'")
        running = asyncio.create_task(
            harness.run(session, "import time\nfor n in range(20):\n    print(n)\n    time.sleep(0.05)\nkept")
        )
        for _ in range(3):
            seen = len(double.requests)
            await eventually_async(lambda seen=seen: len(double.requests) > seen + 1)  # type: ignore[misc]
            double.cut_all()
        ran = await running
        assert (ran.outcome, ran.output) == ("succeeded", "kept")
        assert ran.stdout.split() == [str(n) for n in range(20)]


async def test_a_cloud_that_is_away_for_a_while_costs_nothing(state_dir: Path, double: Double) -> None:
    async with Harness(E2BBackend(state_dir, e2b_section(double))) as harness:
        session = await harness.session()
        execution = await harness.begin(session, "import time\ntime.sleep(0.5)\nprint('done')\n42")
        double.go_down()
        following = asyncio.create_task(follow(execution))
        refused = len(double.requests)
        assert await eventually_async(lambda: len(double.requests) > refused + 3)
        double.come_up()
        ran = await following
        assert (ran.outcome, ran.output, ran.stdout) == ("succeeded", 42, "done\n")


async def test_a_connection_that_is_cut_at_every_byte_loses_nothing(state_dir: Path, double: Double) -> None:
    """The stream of the relay is cut at one position after the other; the answers are whole all the same."""
    async with Harness(E2BBackend(state_dir, e2b_section(double))) as harness:
        session = await harness.session()
        for at_byte in range(0, 1200, 97):
            double.fault(Kind.STREAM_CUT, "/process.Process/Start", at_byte=at_byte)
            double.cut_all()
            ran = await harness.run(session, f"print('x' * 300)\n{at_byte}")
            double.clear_faults()
            assert (ran.outcome, ran.output, ran.stdout) == ("succeeded", at_byte, "x" * 300 + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Lifetime


async def test_a_sandbox_lives_as_long_as_its_lifetime_is_renewed(state_dir: Path, double: Double) -> None:
    async with started(state_dir, e2b_section(double, lifetime_s=60.0)) as backend:
        made = await backend.create(SPEC)
        renewer = backend._started().renewer
        for _ in range(5):
            double.advance(45)
            await renewer.renew_all()
        assert await answers(made)
        double.advance(61)
        assert await eventually_async(lambda: not double.sandboxes)


async def test_a_sandbox_that_ended_is_noticed_with_the_cause(
    state_dir: Path, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s = 0.0
    really = sandbox.cloud_clock_s
    monkeypatch.setattr(sandbox, "cloud_clock_s", lambda: really() + passed_s)
    async with started(state_dir, e2b_section(double, lifetime_s=60.0)) as backend:
        killed, expired = [await backend.create(SPEC) for _ in range(2)]
        assert killed.cloud_id is not None
        await double.vanish(killed.cloud_id)
        assert await killed.cause_of_death() == "its sandbox was killed at E2B"
        passed_s = 61.0
        double.advance(61)
        await eventually_async(lambda: not double.sandboxes)
        assert await expired.cause_of_death() == "its lifetime at E2B ended"
        await backend._started().renewer.renew_all()
        assert killed.is_missing
        assert expired.is_missing
        with pytest.raises(SandboxFailure):
            await GuestChannel(expired.endpoint).connect(5.0)


async def test_a_clock_of_the_cloud_that_jumps_does_no_harm(state_dir: Path, double: Double) -> None:
    async with started(state_dir, e2b_section(double, lifetime_s=60.0)) as backend:
        made = await backend.create(SPEC)
        for jump_s in (-86_400, 45, -3600, 45, 45):
            double.advance(jump_s)
            await backend._started().renewer.renew_all()
            assert await answers(made)


async def test_one_wrong_answer_does_not_end_a_sandbox(backend: E2BBackend, double: Double) -> None:
    made = await backend.create(SPEC)
    for status in (401, 404, 429, 500, 502, 503):
        double.fault(Kind.STATUS, "/sandboxes/{id}/timeout", status=status)
        await backend._started().renewer.renew_all()
    assert not made.is_missing
    assert await answers(made)


async def test_a_wrong_answer_that_is_confirmed_counts_until_the_next_one(backend: E2BBackend, double: Double) -> None:
    made = await backend.create(SPEC)
    renewer = backend._started().renewer
    double.fault(Kind.STATUS, "/sandboxes/{id}/timeout", status=404)
    double.fault(Kind.STATUS, "/sandboxes/{id}", method="GET", status=404)
    await renewer.renew_all()
    assert made.is_missing
    assert await answers(made)
    await renewer.renew_all()
    assert not made.is_missing
    double.fault(Kind.STATUS, DELETE, method="DELETE", status=404)
    await made.destroy()
    assert double.sandboxes == {}


async def test_an_answer_that_names_another_sandbox_does_it_no_harm(
    backend: E2BBackend, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await backend.create(SPEC)
    assert other.cloud_id is not None
    found = await machine_of(backend, other.cloud_id)

    async def lie(*_: object, **__: object) -> Machine:
        return found

    monkeypatch.setattr(backend._started().factory.cloud, "create", lie)
    with pytest.raises(SandboxFailure):
        await backend.create(SPEC)
    await backend.sweep()
    assert set(double.sandboxes) == {other.cloud_id}


async def test_a_cloud_that_does_not_answer_is_the_cause_that_is_reported(backend: E2BBackend, double: Double) -> None:
    made = await backend.create(SPEC)
    double.go_down()
    assert await made.cause_of_death() == "its guest can't be reached, and E2B does not answer"
    double.come_up()


# ---------------------------------------------------------------------------------------------------------------------
# Rest


async def test_a_paused_sandbox_stands_still_and_goes_on(state_dir: Path, double: Double) -> None:
    async with started(state_dir, e2b_section(double, pause_idle_s=1.0)) as backend:
        made = await backend.create(SPEC)
        assert made.pause_idle_s == 1.0
        assert await made.pause()
        assert only(double).state == "paused"
        double.advance(10_000)
        await backend._started().renewer.renew_all()  # no request is made for it
        assert not made.is_missing
        for status in (400, 401, 403, 404, 500):
            double.fault(Kind.STATUS, "/v2/sandboxes/{id}/connect", status=status)
        await made.wake()
        assert only(double).state == "running"
        assert await answers(made)
        assert await made.pause()
        await made.destroy()
        assert double.sandboxes == {}


@pytest.mark.parametrize("status", [400, 403, 404])
async def test_where_pausing_is_refused_it_is_not_tried_again(state_dir: Path, double: Double, status: int) -> None:
    async with started(state_dir, e2b_section(double, pause_idle_s=1.0)) as backend:
        made = await backend.create(SPEC)
        double.fault(Kind.STATUS, "/sandboxes/{id}/pause", status=status)
        assert await made.pause() is False
        assert made.pause_idle_s is None
        assert await answers(made)


async def test_a_cloud_that_is_busy_is_asked_to_pause_again_later(state_dir: Path, double: Double) -> None:
    async with started(state_dir, e2b_section(double, pause_idle_s=1.0)) as backend:
        made = await backend.create(SPEC)
        double.fault(Kind.STATUS, "/sandboxes/{id}/pause", status=503)
        assert await made.pause() is False
        assert made.pause_idle_s == 1.0
        double.fault(Kind.CUT_AFTER, "/sandboxes/{id}/pause")
        with pytest.raises(SandboxFailure):
            await made.pause()  # it is not known whether it runs
        await made.wake()
        assert await answers(made)


# ---------------------------------------------------------------------------------------------------------------------
# Sandboxes of an earlier daemon


async def abandon(backend: E2BBackend) -> None:
    """Imitates a killed daemon: the lock is free, and the cloud got no request."""
    capabilities = backend._started()
    await capabilities.renewer.close()
    for made in backend._live.values():
        await made._connections.close()
    capabilities.directory.release()


async def test_a_list_that_lacks_a_sandbox_is_asked_for_again(
    state_dir: Path, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = E2BBackend(state_dir, e2b_section(double))
    await first.start()
    await first.adopt(())
    made = await first.create(SPEC)
    await abandon(first)
    second = E2BBackend(state_dir, e2b_section(double))
    await second.start()
    try:
        cloud = second._started().factory.cloud
        really, lists = cloud.list, iter([list[Any]()])

        async def stale(metadata: dict[str, str]) -> Any:
            return next(lists, None) or await really(metadata)

        monkeypatch.setattr(cloud, "list", stale)
        adopted = await second.adopt([KnownSandbox(made.sandbox_id, SPEC, made.endpoint.token, "e2b")])
        assert await answers(adopted[made.sandbox_id])
    finally:
        await second.close()
    assert double.sandboxes == {}


async def test_a_sweep_ends_strays_and_no_other_daemon_s_sandboxes(backend: E2BBackend, double: Double) -> None:
    mine = await backend.create(SPEC)
    ours = only(double).metadata
    stray = await double.create({"templateID": "base", "metadata": {**ours, "executor-sandbox": "f" * 16}})
    twin = await double.create({"templateID": "base", "metadata": ours})
    other = await double.create({"templateID": "base", "metadata": {**ours, "executor-daemon": "00000000"}})
    human = await double.create({"templateID": "base"})
    assert await backend.sweep() == 2
    assert set(double.sandboxes) == {mine.cloud_id, other.sandbox_id, human.sandbox_id}
    assert stray.sandbox_id not in double.sandboxes
    assert twin.sandbox_id not in double.sandboxes


async def test_a_sandbox_that_could_not_be_ended_is_ended_by_the_sweep(backend: E2BBackend, double: Double) -> None:
    made = await backend.create(SPEC)
    double.fault(Kind.STATUS, DELETE, method="DELETE", status=500, times=None)
    with pytest.raises(SandboxFailure):
        await made.destroy()
    assert made.teardown.has_failed
    double.clear_faults()
    assert await backend.sweep() == 1
    assert double.sandboxes == {}


async def test_a_list_of_many_pages_is_read_to_its_end(
    backend: E2BBackend, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor_server.backends.e2b import cloud

    monkeypatch.setattr(cloud, "_PAGE_SANDBOXES", 1)
    await backend.create(SPEC)
    ours = {**only(double).metadata, "executor-sandbox": "f" * 16}
    for _ in range(2):
        await double.create({"templateID": "base", "metadata": ours})
    assert await backend.sweep() == 2


async def test_check_host_reports_the_account_and_leaves_nothing(double: Double) -> None:
    images = {"base": "code-interpreter-v1", "bare": "no-python", "gone": "nobody-knows"}
    found = {finding.subject: finding for finding in await examine(e2b_section(double, images=images))}
    assert found["SDK"].ok
    assert found["E2B"].ok
    assert "CPython 3." in found["image base"].detail
    assert "no Python" in found["image bare"].detail
    assert "nobody-knows" in found["image gone"].detail
    assert "the supervisor" in found["memory limit"].detail
    assert not found["processor limit"].ok
    assert all(finding.ok for finding in found.values() if finding.required)
    assert double.sandboxes == {}


async def test_check_host_names_the_tried_versions(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor_server.backends.e2b import check

    monkeypatch.setattr(check, "_version", lambda _: "9.9.9")
    found = (await examine(e2b_section(double)))[0]
    assert (found.ok, found.required) == (False, False)
    assert "2.63.0 with 2.11.5" in found.detail


async def test_a_template_whose_shell_prints_a_greeting_works(state_dir: Path) -> None:
    """The double's own templates have a quiet shell; output before the relay's greeting is skipped."""
    talking = Template("talking")
    async with (
        Double(templates=(talking,)) as double,
        started(state_dir, e2b_section(double, images={"base": talking.template_id})) as backend,
    ):
        made = await backend.create(SPEC)
        machine = await machine_of(backend, str(made.cloud_id))
        await machine.upload("/root/.bash_profile", b"echo Welcome; echo 1 00000000 aGk=\n")
        assert await answers(made)
