"""The findings of check-host decide about the start, and name each remedy."""

from __future__ import annotations

from executor_server.backends.findings import Findings, confinement_findings


def _confinement(**changes: object) -> dict[str, bool]:
    walls = {"is_alone": True, "interfaces": ("lo",), "is_bare": True, "is_filtered": True, **changes}
    return {subject: ok for subject, ok, _ in confinement_findings(**walls)}  # type: ignore[arg-type]


def test_each_missing_wall_is_a_finding_of_its_own() -> None:
    assert all(_confinement().values())
    for changes, subject in (
        ({"is_alone": False}, "process namespace"),
        ({"interfaces": ("lo", "eth0")}, "network namespace"),
        ({"is_bare": False}, "privileges"),
        ({"is_filtered": False}, "system call filter"),
    ):
        assert [name for name, ok in _confinement(**changes).items() if not ok] == [subject]
    assert all(_confinement(is_filtered=False, own_kernel="4.4.0").values())


def test_required_findings_refuse_the_start_with_their_remedies() -> None:
    found = Findings()
    found.add("swap limit", False, "There is none.", "Turn it on.", required=False)
    assert found.suffices
    found.add_confinement([("user", False, "Code runs as root.")], "Set docker.runtime.")
    found.add_confinement([("user", True, "Code runs as user 7.")], "Set docker.runtime.")
    assert not found.suffices and len(found.findings) == 2, "the first image's answer counts"
    assert str(found.refusal("Docker")) == (
        "this host cannot run Docker sandboxes. user: Code runs as root. Set docker.runtime."
    )
