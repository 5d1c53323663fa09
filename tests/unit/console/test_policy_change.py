"""What the console proposes to paste is a policy that grants the request, asks no more, and keeps the rest."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.policy_change import policy_change
from executor_server.policy import parse_policy
from executor_server.policy.explain.diff import differences

POLICY = """
version = "1"
default = "team.data"

[profiles.base.network]
default = ["a.example:443"]

[profiles."team.data"]
extends = "base"

[profiles."team.data".network]
ask = ["pypi.org:443", "*.b.example"]

[profiles."team.data".packages]
ask = ["humanize>=4", "Pan_das"]

[profiles."team.data".tools]
ask = ["send_*", "drop"]

[profiles."team.data".imports]
ask = ["ctypes", "os"]
"""


def approval(subject: str, what: str) -> admin_pb.Approval:
    return admin_pb.Approval(what=what, rule=f'profiles."team.data".{subject}.ask')


@pytest.mark.parametrize(
    ("subject", "what", "key", "granted", "ask"),
    [
        ("network", "pypi.org:443", "default", ["a.example:443", "pypi.org:443"], ["*.b.example"]),
        ("network", "x.b.example:443", "default", ["a.example:443", "x.b.example:443"], None),
        ("packages", "humanize==4.1", "allowed", ["humanize>=4"], ["Pan_das"]),
        ("packages", "pan-das", "allowed", ["Pan_das"], ["humanize>=4"]),
        ("tools", "send_report", "allowed", ["*", "send_report"], None),
        ("tools", "drop", "allowed", ["*", "drop"], ["send_*"]),
        ("imports", "ctypes", "allowed", ["*", "ctypes"], ["os"]),
        ("imports", "*", "allowed", ["*"], []),
    ],
)
def test_the_snippet_grants_what_was_asked_for_and_keeps_the_rest(
    subject: str, what: str, key: str, granted: list[str], ask: list[str] | None
) -> None:
    change = policy_change(approval(subject, what), POLICY)
    assert change is not None and change.is_complete
    keys = tomllib.loads(change.snippet)["profiles"]["team.data"][subject]
    assert keys == {key: granted, **({} if ask is None else {"ask": ask})}
    if what == "*":
        return
    changed = POLICY.replace(f'[profiles."team.data".{subject}]\n', f"{change.snippet}\n")
    if ask is not None:  # the old line goes
        head, _, tail = changed.partition(change.snippet)
        changed = head + change.snippet + tail[tail.index("\n", 1) :]
    before, after = (parse_policy(text.encode(), Path("policy.toml")) for text in (POLICY, changed))
    profile = after.profiles["team.data"]
    assert len(getattr(getattr(profile, subject), key)) == len(granted)
    assert {each.key.rpartition(".")[0] for each in differences(before, after)} <= {
        f'profiles."team.data".{subject}',
        "",
    }


def test_without_the_text_of_the_policy_the_snippet_says_that_entries_must_be_kept() -> None:
    change = policy_change(approval("tools", "drop"))
    assert change is not None and not change.is_complete
    assert change.snippet == '[profiles."team.data".tools]\nallowed = ["drop"]  # and the entries that it has'


def test_what_the_policy_can_not_name_has_no_snippet() -> None:
    assert policy_change(approval("tools", "\\u0430pply"), POLICY) is None
    assert policy_change(admin_pb.Approval(what="x", rule="quotas"), POLICY) is None
