"""The policy file of the contract's sessions: what they may do without a policy of their own, and profiles of tests.

A test that is about the policy gives a profile as the policy file would have it, `language.open = false` for instance.
In one process the policy's own code holds the session's spec to it (harness.py); behind a front the file is changed,
and the change takes the way that an operator's takes (wire_policies.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from executor_server.policy import Policy, parse_policy

# Approves what the harness of one process makes without a policy.
_CONTRACT = """\
default = "contract"

[profiles.contract]
on_reload = "tighten"
imports = { default = [], allowed = ["*"] }
language.preset = "standard"
state.allow_foreign = true
"""


def policy_text(profiles: Mapping[str, str]) -> str:
    """Returns the file in which each of these names is a tenant with that profile; all other tenants have the usual one."""
    parts = [f'[profiles."{name}"]\nextends = "contract"\n{text}\n' for name, text in profiles.items()]
    parts += [f'[tenants."{name}"]\nprofile = "{name}"\n' for name in profiles]
    return "\n".join([_CONTRACT, *parts])


def policy_of(tenant: str, profile: str, *, images: tuple[str, ...], backend: str) -> Policy:
    """Returns the policy of a daemon in which a tenant has this profile."""
    file = parse_policy(policy_text({tenant: profile}).encode(), Path("policy.toml"))
    return Policy(file, images=images, backend=backend, orphan_time_s=60.0)
