"""Two policies are compared by what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.policy.explain.diff import Change, differences
from executor_server.policy.file import parse_policy


def changes(old: str, new: str) -> list[Change]:
    return differences(*(parse_policy(text.encode(), Path("p.toml")) for text in (old, new)))


def in_profile(old: str, new: str) -> list[Change]:
    return changes(*(f"[profiles.a]\n{text}" for text in (old, new)))


def test_what_means_the_same_is_no_change() -> None:
    old = """
        [profiles.a]
        language = { preset = "strict", open = true, file_writing = true }
        sandbox.fork_server = "shared"
        [profiles.b]
        limits.max.wall_time_s = 3600
        imports.allowed = ["x", "x.*"]
        tools.allowed = ["web_*", "web_a"]
        """
    new = """
        [profiles.b]
        extends = "c"
        [profiles.c]
        imports.allowed = ["x.*"]
        tools.allowed = ["web_*"]
        [profiles.a.language]
        open = true
        dunder_access = false
        dynamic_code = false
        namespaces = false
        module_attributes = false
        dangerous_functions = false
        unlisted_builtins = false
        """
    assert changes(old, new) == [Change("profiles.c", "nothing", "added")]


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (
            "",
            "limits.max.wall_time_s = 4000",
            Change("limits.max.wall_time_s", "3600.0", "4000.0", "looser"),
        ),
        ("limits.cpus = 2", "", Change("limits.cpus", "2.0", "all", "looser")),
        ("", "quotas.sessions = 2", Change("quotas.sessions", "no quota", "2", "tighter")),
        ("files.max_puts = 3", "", Change("files.max_puts", "3", "no limit", "looser")),
        ("", "imports.allowed = ['x']", Change("imports.allowed", "*", "x", "tighter")),
        ("imports.allowed = ['x']", "imports.allowed = ['y']", Change("imports.allowed", "x", "y")),
        (
            "imports.denied = ['os.path']",
            "imports.denied = ['os']",
            Change("imports.denied", "os.path", "os", "tighter"),
        ),
        ("", "language.open = false", Change("language.open", "true", "false", "tighter")),
        ("", "network.default = ['a.example']", Change("network.default", "none", "a.example", "looser")),
        (
            "network.allowed = ['a.example']",
            "network.allowed = ['a.example:443']",
            Change("network.allowed", "a.example", "a.example:443", "tighter"),
        ),
        (
            "network.allowed = ['*.b.example', 'c.example:443']",
            "network.allowed = ['a.b.example', 'c.example']",
            Change("network.allowed", "*.b.example, c.example:443", "a.b.example, c.example"),
        ),
        (
            "network.denied = ['a.b.example:443']",
            "network.denied = ['b.example']",
            Change("network.denied", "a.b.example:443", "b.example", "tighter"),
        ),
        (
            "network.denied = ['b.example:443']",
            "network.denied = ['b.example']",
            Change("network.denied", "b.example:443", "b.example", "tighter"),
        ),
        (
            "",
            "network.max_sent_bytes = '1MiB'",
            Change("network.max_sent_bytes", "104,857,600", "1,048,576", "tighter"),
        ),
        (
            "network.allowed = ['a.example']",
            "network.allowed = ['a.example']\n"
            "network.secrets = [{ host = 'a.example', header = 'X-Key', value = '${k}' }]",
            Change("network.secrets", "none", "X-Key: ${k} for a.example"),
        ),
        ("", "network.audit = 'denials'", Change("network.audit", "connections", "denials")),
        ("", "sandbox.images = ['a']", Change("sandbox.images", "all", "a", "tighter")),
        (
            "sandbox.images = ['a', 'b']",
            "sandbox.images = ['b', 'a']",
            Change("sandbox.images", "a, b", "b, a"),
        ),
        ("", "sandbox.backends = ['e2b']", Change("sandbox.backends", "the daemon's own", "e2b")),
        (
            "sandbox.backends = ['docker']",
            "sandbox.backends = ['docker', 'e2b']",
            Change("sandbox.backends", "docker", "docker, e2b", "looser"),
        ),
        (
            "sandbox.backends = ['docker', 'e2b']",
            "sandbox.backends = ['e2b', 'docker']",
            Change("sandbox.backends", "docker, e2b", "e2b, docker"),
        ),
        ("", "sandbox.pull_images = true", Change("sandbox.pull_images", "false", "true", "looser")),
        ("", "sandbox.fork_server = 'tenant'", Change("sandbox.fork_server", "shared", "tenant", "tighter")),
        (
            "language.preset = 'strict'\nsandbox.fork_server = 'off'",
            "language.preset = 'strict'\nsandbox.fork_server = 'tenant'",
            Change("sandbox.fork_server", "off", "tenant", "looser"),
        ),
        (
            "sandbox.fork_server = 'shared'",
            "sandbox.fork_server = 'tenant'",
            Change("sandbox.fork_server", "shared", "tenant", "tighter"),
        ),
        (
            "tools.allowed = ['web_*']",
            "tools.allowed = ['web_a']",
            Change("tools.allowed", "web_*", "web_a", "tighter"),
        ),
        ("", "tools.placements = []", Change("tools.placements", "host, sandbox", "none", "tighter")),
        ("", "packages.allowed = ['X>=1']", Change("packages.allowed", "none", "x>=1", "looser")),
        (
            "packages.allowed = ['x>=1']",
            "packages.allowed = ['x>=1.5,<2']",
            Change("packages.allowed", "x>=1", "x<2,>=1.5", "tighter"),
        ),
        (
            "packages.allowed = ['x>=1']",
            "packages.allowed = ['x[a]>=1']",
            Change("packages.allowed", "x>=1", "x[a]>=1", "looser"),
        ),
        ("packages.allowed = ['x>1']", "packages.allowed = ['x<2']", Change("packages.allowed", "x>1", "x<2")),
        ("packages.allowed = ['x']", "packages.allowed = ['y']", Change("packages.allowed", "x", "y")),
        ("packages.allowed = ['x<2']", "packages.allowed = ['*']", Change("packages.allowed", "x<2", "*", "looser")),
        (
            "packages.allowed = ['*']",
            "packages.allowed = ['*', 'x<2']",
            Change("packages.allowed", "*", "*, x<2", "tighter"),
        ),
        (
            "packages.allowed = ['*', 'x<2']",
            "packages.allowed = ['x']",
            Change("packages.allowed", "*, x<2", "x"),
        ),
        ("", "packages.auto = true", Change("packages.auto", "false", "true", "looser")),
        ("", "packages.exclude_newer = '2w'", Change("packages.exclude_newer", "not set", "2w", "tighter")),
        (
            "packages.exclude_newer = '2w'",
            "packages.exclude_newer = '13d'",
            Change("packages.exclude_newer", "2w", "13d", "looser"),
        ),
        (
            "packages.exclude_newer = '2w'",
            "packages.exclude_newer = '14d'",
            Change("packages.exclude_newer", "2w", "14d"),
        ),
        ("", "packages.max_requirements = 3", Change("packages.max_requirements", "64", "3", "tighter")),
        ("", "packages.imports = { a = 'b' }", Change("packages.imports", "none", "a = b")),
        ("", "audit.fail_closed = true", Change("audit.fail_closed", "false", "true", "tighter")),
        ("", "audit.code = 'full'", Change("audit.code", "hash", "full")),
        ("", "on_reload = 'end'", Change("on_reload", "keep", "end")),
    ],
)
def test_a_change_of_a_profile_has_a_direction_where_there_is_one(old: str, new: str, change: Change) -> None:
    (found,) = in_profile(old, new)
    assert found == Change(f"profiles.a.{change.key}", change.old, change.new, change.direction)


def test_what_a_profile_inherits_changes_with_it() -> None:
    old = "[profiles.a]\n[profiles.b]\nextends = 'a'"
    new = "[profiles.a]\nfiles.max_puts = 1\n[profiles.b]\nextends = 'a'"
    assert [change.key for change in changes(old, new)] == ["profiles.a.files.max_puts", "profiles.b.files.max_puts"]


def test_a_tenant_that_comes_under_another_profile_is_told_what_that_means() -> None:
    profiles = "[profiles.a]\nquotas.calls = 5\n[profiles.'b.c']\nquotas.calls = 9\n[tenants]\n"
    assert changes(f"default = 'a'\n{profiles}x = {{}}", f"default = 'a'\n{profiles}x.profile = 'b.c'") == [
        Change("tenants.x.profile", "a", "b.c"),
        Change('tenants.x → profiles."b.c".quotas.calls', "5", "9", "looser"),
    ]


def test_who_comes_and_who_goes_is_told() -> None:
    old = "version = '1'\ndefault = 'a'\n[profiles.a]\n[profiles.b]\n[tenants]\nx.uids = [1]\ny = {}"
    new = "version = '2'\n[profiles.a]\n[profiles.c]\n[tenants]\nx = {profile = 'a', uids = [1, 2], admin = true}\nz.profile = 'a'"
    assert changes(old, new) == [
        Change("version", "1", "2"),
        Change("default", "a", "nobody", "tighter"),
        Change("profiles.b", "there", "removed"),
        Change("profiles.c", "nothing", "added"),
        Change("tenants.x.admin", "false", "true", "looser"),
        Change("tenants.x.uids", "1", "1, 2", "looser"),
        Change("tenants.y", "there", "removed"),
        Change("tenants.z", "nothing", "added"),
    ]
