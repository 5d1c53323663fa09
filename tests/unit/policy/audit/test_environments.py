"""The making of an environment is recorded with the hash of what was installed."""

from __future__ import annotations

from pathlib import Path

from executor_server.api.assembly.watchers import EnvironmentTrail
from executor_server.packages import BuildEnd, EnvironmentUse, Lock
from tests.support.audit import audit_log, records

USE = EnvironmentUse("acme", "local", "base", ("numpy>=2",))
LOCK = Lock("numpy==2.5.5\n", "cpython-3.12.4", "x86_64-manylinux_2_39", "0.13.9", ("numpy==2.5.5",))


async def test_each_build_and_each_removal_is_a_record(tmp_path: Path) -> None:
    async with audit_log(tmp_path / "audit") as log:
        trail = EnvironmentTrail(log)
        trail.build_ended(BuildEnd(USE, LOCK, "made", took_s=2.5, size_bytes=1000, error=""))
        trail.build_ended(BuildEnd(USE, None, "timed out", took_s=600.0, size_bytes=0, error="it took more than 600 s"))
        trail.environment_evicted(LOCK.environment_id, 1000, "to make room")
    common = {"seq", "time", "prev", "hash"}
    found = [{key: value for key, value in each.items() if key not in common} for each in records(tmp_path / "audit")]
    asked = {"tenant": "acme", "backend": "local", "image": "base", "packages": ["numpy>=2"]}
    assert found == [
        {
            "kind": "environment_built",
            **asked,
            "outcome": "made",
            "took_s": 2.5,
            "environment": LOCK.environment_id,
            "lock_sha256": LOCK.sha256,
            "interpreter": "cpython-3.12.4",
            "platform": "x86_64-manylinux_2_39",
            "pins": ["numpy==2.5.5"],
            "pin_count": 1,
            "bytes": 1000,
        },
        {
            "kind": "environment_built",
            **asked,
            "outcome": "timed_out",
            "took_s": 600.0,
            "error": "it took more than 600 s",
        },
        {
            "kind": "environment_removed",
            "environment": LOCK.environment_id,
            "bytes": 1000,
            "reason": "to make room",
        },
    ]


async def test_a_build_of_many_packages_fits_a_record(tmp_path: Path) -> None:
    pins = tuple(f"package-{number}==1.0" for number in range(5000))
    lock = Lock("\n".join(pins), "cpython-3.12.4", "x86_64", "0.13.9", pins)
    async with audit_log(tmp_path / "audit") as log:
        EnvironmentTrail(log).build_ended(BuildEnd(USE, lock, "made", took_s=1.0, size_bytes=1, error="x" * 100_000))
    (record,) = records(tmp_path / "audit")
    assert (record["lock_sha256"], record["pin_count"]) == (lock.sha256, 5000)
    assert len(record["pins"]) < 100 and len(record["error"]) < 10_000
