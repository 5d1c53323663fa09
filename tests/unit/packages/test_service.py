"""The service of environments: one build however many ask, failures remembered, nothing half-made, nothing forgotten."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from executor_server.backends.environments import Target
from executor_server.core import EnvironmentFailed, ImageNotReady, PackagesSpec, Progress, SandboxFailure
from executor_server.packages import EnvironmentService, EnvironmentSettings, build_queue, requested_by
from tests.unit.packages.conftest import Bench, made
from tests.unit.packages.fake_builder import IMAGE, packages

NUMPY = packages("numpy")
PANDAS = packages("numpy", "pandas>=2")


async def refused(service: EnvironmentService, wanted: PackagesSpec) -> ImageNotReady:
    with pytest.raises(ImageNotReady) as caught:
        await service.ready(wanted, IMAGE)
    return caught.value


def staged(bench: Bench) -> list[Path]:
    return list(bench.places.staging.iterdir())


async def test_environment_is_made_once_and_answered_from_then_on(bench: Bench) -> None:
    service = await bench.service()
    first = await made(service, PANDAS)
    assert first.pins == ("numpy==1.0", "pandas==1.0") and first.modules == ("numpy", "pandas")
    assert (first.directory / "site/numpy/data.txt").read_text() == "numpy==1.0"
    assert await service.ready(PANDAS, IMAGE) == first
    assert bench.builder.made[first.environment_id] == 1 and bench.observer.outcomes == ["made"]
    assert staged(bench) == []


async def test_a_request_is_a_hit_or_a_miss_and_never_both(bench: Bench) -> None:
    service = await bench.service(EnvironmentSettings(lock_lifetime_s=100))
    environment = await service.ready(NUMPY, IMAGE)  # built at once
    assert (bench.observer.hits, len(bench.observer.misses)) == ([], 1)
    await service.ready(NUMPY, IMAGE)
    bench.now_s += 101
    await service.ready(NUMPY, IMAGE)  # its lock is refreshed in the background
    await bench.observer.builds_ended(2)
    assert (bench.observer.hits, len(bench.observer.misses)) == ([environment.environment_id] * 2, 1)
    await bench.close()
    await (await bench.service()).ready(NUMPY, IMAGE)  # checked, and not built
    assert (len(bench.observer.hits), len(bench.observer.misses)) == (3, 1)


async def test_requests_that_share_a_build_that_ends_at_once_are_misses(bench: Bench) -> None:
    service = await bench.service()
    with requested_by("acme"):
        first = asyncio.create_task(service.ready(NUMPY, IMAGE))
    with requested_by("zeta"):
        second = asyncio.create_task(service.ready(NUMPY, IMAGE))
    assert await first == await second
    assert bench.observer.hits == [] and sorted(use.requester for use in bench.observer.misses) == ["acme", "zeta"]


async def test_twenty_requests_at_once_are_one_build(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.may_make.clear()
    answers = await asyncio.gather(*(refused(service, PANDAS) for _ in range(20)))
    assert all(answer.progress == Progress("installing", 1, 2, "packages") for answer in answers)
    assert str(answers[0]) == (
        "the environment of numpy and pandas>=2 is being made: installing, 1 of 2 packages"
    ) and all(answer.retry_after_s == 1.0 for answer in answers)
    bench.builder.may_make.set()
    found = await asyncio.gather(*(made(service, PANDAS) for _ in range(20)))
    assert len(set(found)) == 1 and bench.builder.made.total() == 1 and bench.builder.resolved.total() == 1


async def test_different_requests_of_one_lock_are_one_build(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.may_make.clear()
    other = packages("numpy>=1")
    await asyncio.gather(refused(service, NUMPY), refused(service, other))
    bench.builder.may_make.set()
    assert await made(service, NUMPY) == await made(service, other)
    assert bench.builder.made.total() == 1 and bench.builder.resolved.total() == 2
    assert sorted(bench.observer.outcomes) == ["made", "reused"]


async def test_build_that_waited_for_another_makes_the_environment_when_that_one_fails(bench: Bench) -> None:
    """The other may fail for a reason of its own, such as a lower limit of bytes."""
    service = await bench.service()
    bench.builder.may_make.clear()
    bench.builder.fail_make = lambda: EnvironmentFailed("too large")
    other = packages("numpy>=1")
    await asyncio.gather(refused(service, NUMPY), refused(service, other))
    assert bench.builder.made.total() == 1
    bench.builder.may_make.set()
    bench.builder.fail_make = None
    failed, well = sorted(
        await asyncio.gather(made(service, NUMPY), made(service, other), return_exceptions=True),
        key=lambda each: not isinstance(each, EnvironmentFailed),
    )
    assert isinstance(failed, EnvironmentFailed) and not isinstance(well, BaseException)
    assert bench.builder.made.total() == 2


async def test_no_more_are_made_at_a_time_than_configured_and_tenants_take_turns(bench: Bench) -> None:
    service = await bench.service(EnvironmentSettings(concurrency=2))
    bench.builder.may_make.clear()
    with requested_by("greedy"):
        await asyncio.gather(*(refused(service, packages(f"p{number}")) for number in range(5)))
    with requested_by("modest"):
        await refused(service, packages("q"))
    assert bench.builder.running == 2
    waiting = await refused(service, packages("q"))
    assert waiting.progress == Progress("waiting for other environments")
    bench.builder.may_make.set()
    for number in range(5):
        await made(service, packages(f"p{number}"))
    await made(service, packages("q"))
    assert bench.builder.most_running == 2
    assert [use.requester for use in bench.observer.started].index("modest") == 2


async def test_the_queue_has_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_queue, "MAX_QUEUED", 2)
    service = await bench.service(EnvironmentSettings(concurrency=1))
    bench.builder.may_make.clear()
    await asyncio.gather(*(refused(service, packages(f"p{number}")) for number in range(3)))
    full = await refused(service, packages("one-too-many"))
    assert str(full) == "the environment of one-too-many can't be made yet: 2 others wait to be made"
    assert full.retry_after_s == 5.0 and full.progress is None


async def test_a_tenant_that_fills_its_part_of_the_queue_leaves_room_for_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant could keep all others from packages: `numpy>=1.1`, `numpy>=1.2` and so on filled the whole queue."""
    monkeypatch.setattr(build_queue, "MAX_QUEUED_OF_TENANT", 2)
    service = await bench.service(EnvironmentSettings(concurrency=1))
    bench.builder.may_make.clear()
    with requested_by("greedy"):
        await asyncio.gather(*(refused(service, packages(f"p{number}")) for number in range(3)))
        full = await refused(service, packages("one-too-many"))
    end = "can't be made yet: 2 others of this tenant wait to be made"
    assert str(full) == f"the environment of one-too-many {end}"
    with requested_by("modest"):
        waiting = await refused(service, packages("q"))
    assert waiting.progress == Progress("waiting for other environments")


async def test_conflict_is_answered_from_memory_and_is_final(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.fail_resolve = lambda: EnvironmentFailed("no version of numpy fits both")
    for _ in range(5):
        failure = await refused(service, NUMPY)
        assert isinstance(failure, EnvironmentFailed) and str(failure) == "no version of numpy fits both"
        assert failure.retry_after_s is None
    assert bench.builder.resolved.total() == 1 and bench.observer.outcomes == ["refused"]


async def test_passing_failure_is_remembered_for_its_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    service = await bench.service()
    bench.builder.fail_resolve = lambda: ImageNotReady("the index does not answer", retry_after_s=30)
    first, again = await refused(service, NUMPY), await refused(service, NUMPY)
    assert str(first) == str(again) == "the index does not answer" and not isinstance(first, EnvironmentFailed)
    assert again.retry_after_s is not None and 25 < again.retry_after_s <= 30
    assert bench.builder.resolved.total() == 1
    bench.builder.fail_resolve = None
    await service.collect()
    assert (await made(service, NUMPY)).pins == ("numpy==1.0",)


async def test_failure_of_ours_says_nothing_of_the_host(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.fail_make = lambda: SandboxFailure("/secret/path is broken")
    failure = await refused(service, NUMPY)
    assert str(failure) == "the environment of numpy could not be made: the daemon's log has the reason"
    assert failure.retry_after_s is not None and staged(bench) == []


async def test_bug_in_the_builder_is_a_failure_too(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.fail_make = lambda: ZeroDivisionError("a bug")
    assert "the daemon's log has the reason" in str(await refused(service, NUMPY))
    assert staged(bench) == [] and bench.observer.outcomes == ["failed"]


async def test_full_disk_is_said_and_nothing_half_made_stays(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.fail_make = lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failure = await refused(service, NUMPY)
    assert str(failure) == (
        "the environment of numpy could not be made: the daemon's disk is full; its administrator can make room, or "
        "remove unused environments (`executor-server env gc`)"
    )
    assert staged(bench) == [] and list(bench.places.ready.iterdir()) == []


async def test_build_that_takes_too_long_is_ended(bench: Bench) -> None:
    service = await bench.service(EnvironmentSettings(build_timeout_s=0.05))
    bench.builder.may_make.clear()
    failure = await refused(service, NUMPY)
    assert str(failure) == (
        "the environment of numpy could not be made: it took longer than 0.05 s, and had come to this: "
        "installing, 0 of 1 packages"
    )
    assert bench.builder.running == 0 and bench.observer.outcomes == ["timed out"] and staged(bench) == []


async def test_close_ends_builds_and_leaves_nothing_half_made(bench: Bench) -> None:
    service = await bench.service()
    bench.builder.may_make.clear()
    await refused(service, NUMPY)
    await service.close()
    assert bench.builder.ended == ["resolve", "make"] and staged(bench) == []
    assert bench.observer.outcomes == ["cancelled"]
    with pytest.raises(SandboxFailure, match="not open"):
        await service.ready(NUMPY, IMAGE)


async def test_next_daemon_finds_the_environment_without_a_build(bench: Bench) -> None:
    first = await made(await bench.service(), PANDAS)
    await bench.close()
    service = await bench.service()
    assert await made(service, PANDAS) == first
    assert bench.builder.made.total() == 1 and bench.builder.resolved.total() == 1
    assert bench.observer.outcomes == ["made"]  # and no second build


async def test_same_packages_for_another_image_are_another_request(bench: Bench) -> None:
    service = await bench.service()
    await made(service, NUMPY)
    await made(service, NUMPY, Target("local", "base", "image-2"))
    assert bench.builder.resolved.total() == 2 and bench.builder.made.total() == 1


async def test_lock_is_made_again_in_the_background_while_the_old_one_serves(bench: Bench) -> None:
    service = await bench.service(EnvironmentSettings(lock_lifetime_s=100))
    old = await made(service, NUMPY)
    bench.now_s += 101
    bench.builder.versions["numpy"] = "2.0"
    bench.builder.may_make.clear()
    assert await service.ready(NUMPY, IMAGE) == old
    bench.builder.may_make.set()
    await bench.observer.builds_ended(2)
    new = await service.ready(NUMPY, IMAGE)
    assert new.pins == ("numpy==2.0",) and bench.builder.resolved[NUMPY] == 2
    await service.ready(NUMPY, IMAGE)
    assert bench.builder.resolved[NUMPY] == 2


async def test_lock_that_can_not_be_made_again_goes_on_serving(bench: Bench) -> None:
    service = await bench.service(EnvironmentSettings(lock_lifetime_s=100))
    old = await made(service, NUMPY)
    bench.now_s += 101
    bench.builder.fail_resolve = lambda: ImageNotReady("the index does not answer", retry_after_s=30)
    await service.ready(NUMPY, IMAGE)
    await bench.observer.builds_ended(2)
    assert await service.ready(NUMPY, IMAGE) == old
    assert not service.builds() and bench.builder.resolved[NUMPY] == 2  # and not with each request


async def test_environment_that_is_larger_than_a_policy_allows_is_refused(bench: Bench) -> None:
    service = await bench.service()
    await made(service, NUMPY)
    with pytest.raises(EnvironmentFailed, match="has 5,000 bytes, and the policy allows 4,000"):
        await made(service, packages("numpy", max_environment_bytes=4000))


async def test_who_asked_is_known(bench: Bench) -> None:
    service = await bench.service()
    with requested_by("acme"):
        environment = await made(service, NUMPY)
    bench.now_s += 100
    with requested_by("zeta"):
        await service.ready(NUMPY, IMAGE)
    info = service.show(environment.environment_id)
    assert info is not None and info.requesters == ("zeta", "acme") and info.requests == (("numpy",),)
    assert info.images == ("local/base",) and info.used_s == bench.now_s and info.lock.pins == ("numpy==1.0",)
    assert bench.observer.ended[0][0].requester == "acme"
    lock = bench.observer.locks[0]
    assert lock is not None and lock.environment_id == environment.environment_id


async def test_service_without_requests_makes_no_directory(bench: Bench) -> None:
    service = await bench.service()
    service.release("no-such-sandbox")
    service.keep_only("local", [])
    assert service.list() == [] and (await service.collect()).evicted == ()
    assert not bench.places.root.exists()


async def test_two_daemons_do_not_share_a_directory(bench: Bench) -> None:
    await made(await bench.service(), NUMPY)
    with pytest.raises(SandboxFailure, match="another daemon"):
        await bench.service()


async def test_only_the_daemons_user_can_enter(bench: Bench) -> None:
    environment = await made(await bench.service(), NUMPY)
    for path in (bench.places.root, bench.places.ready, bench.places.holds, environment.directory.parent):
        assert path.stat().st_mode & 0o077 == 0
    assert environment.directory.stat().st_mode & 0o777 == 0o755
