"""`executor-server policy` checks, explains and compares files; scripts can go by its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from executor_server.daemon.cli import main
from executor_server.daemon.cli.policy import EXIT_REFUSED
from executor_server.daemon.cli.shared import EXIT_CONFIG

POLICY = """\
version = "1"
[profiles.base]
limits.max.wall_time_s = 100
sandbox.images = ["base", "elsewhere"]
[profiles.data]
extends = "base"
[tenants.x]
profile = "data"
admin = true
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("EXECUTOR_CONFIG", raising=False)
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def config(tmp_path: Path, file: Path) -> Path:
    path = tmp_path / "executor.toml"
    path.write_text(f'[server]\nbackend = "local"\n[policy]\nfile = "{file}"\n')
    return path


def run(*arguments: object, input_: str | None = None) -> Result:
    return CliRunner().invoke(main, ["policy", *map(str, arguments)], input=input_, catch_exceptions=False)


def explain(file: Path, asked: object, *options: object) -> Result:
    return run("explain", file, "--tenant", "x", "--request", json.dumps(asked), *options)


# -- check


def test_a_policy_that_can_be_used_is_summed_up(file: Path) -> None:
    result = run("check", file)
    assert result.exit_code == 0
    first, version, fingerprint, *others = result.output.splitlines()
    assert first == f"{file} can be used."
    assert version == "version      1"
    assert len(fingerprint.removeprefix("fingerprint  ")) == 16
    assert others == [
        "default      none: unlisted tenants are refused",
        "profile      base",
        "profile      data (extends base)",
        "tenant       x: profile data, admin",
    ]


NETWORK = """\
[profiles.base.network]
allowed = ["api.example.com:443", "*.example.org"]
denied = ["x.example.org"]
[[profiles.base.network.secrets]]
host = "api.example.com"
header = "Authorization"
value = "Bearer ${bot}"
"""


def test_secrets_can_be_checked_only_with_the_configuration(file: Path, config: Path) -> None:
    file.write_text(POLICY.replace('"elsewhere"', '"base"') + NETWORK)
    alone = run("check", file)
    assert alone.exit_code == 0
    said = "not checked  secrets of the configuration, as there is no --config: bot"
    assert alone.output.splitlines()[-1] == said
    whole = run("check", file, "--config", config)
    assert whole.exit_code == EXIT_CONFIG
    assert "profiles.base.network.secrets: the configuration has no secret 'bot' (egress.secrets; it has none)" in (
        whole.output
    )
    config.write_text(config.read_text() + '[egress.secrets]\nbot = "/etc/bot"\n')
    whole = run("check", file, "--config", config)
    assert whole.exit_code == 0 and "not checked" not in whole.output


def test_the_network_of_a_granted_session_is_shown_without_secrets(file: Path) -> None:
    file.write_text(POLICY + NETWORK)
    result = explain(file, {"network": ["api.example.com:443", "a.example.org"], "connections": ["a.example.org:80"]})
    assert result.exit_code == 0
    shown = [line for line in result.output.splitlines() if "network" in line]
    assert shown == [
        "  network: a.example.org, api.example.com:443",
        "  denied_network: x.example.org",
        "  network.secrets: Authorization for api.example.com, methods all, paths all",
        "  network: max_connections 32, max_new_connections_per_minute 600, max_sent_bytes 104857600, "
        "max_received_bytes 1073741824, max_connection_s 3600.0, audit connections",
    ]
    assert "  network: none" in explain(file, {}).output.splitlines()


def test_a_refused_host_is_explained_by_its_line(file: Path) -> None:
    file.write_text(POLICY + NETWORK)
    result = explain(file, {"network": ["api.example.com", "b.x.example.org", "*.example.org"]})
    assert result.exit_code == EXIT_REFUSED
    assert result.output.splitlines() == [
        "refused to tenant x, profile data, which extends base",
        "  network: asked for api.example.com, allowed is api.example.com:443, *.example.org (NOT_ALLOWED)",
        f'    {file}:11: allowed = ["api.example.com:443", "*.example.org"]    '
        "# network.allowed of profile base, which data extends",
        "  network: asked for b.x.example.org, allowed is nothing of x.example.org (DENIED)",
        f'    {file}:12: denied = ["x.example.org"]    # network.denied of profile base, which data extends',
    ]


def test_a_connection_that_a_session_could_ask_for_is_told_so(file: Path) -> None:
    file.write_text(POLICY + NETWORK)
    result = explain(file, {"connections": ["a.example.org:443", "a.example.org:22", "y.x.example.org:443"]})
    assert result.exit_code == EXIT_REFUSED
    first, second, third = (line for line in result.output.splitlines() if "#" in line)
    assert first.endswith("; or the session asks for it, which it may (network of the request)")
    assert "which it may" not in second and "which it may" not in third
    asked = explain(file, {"network": ["*.example.org"], "connections": ["y.x.example.org:443"]})
    assert "connections: asked for y.x.example.org:443, allowed is nothing of x.example.org (DENIED)" in asked.output
    wrong = explain(file, {"connections": ["a.example.org"]})
    assert wrong.exit_code == 2 and 'it must be a host and a port, as "pypi.org:443"' in wrong.output


def test_a_secret_that_the_daemon_lacks_is_a_line_of_its_configuration(file: Path, config: Path) -> None:
    file.write_text(POLICY + NETWORK)
    config.write_text(config.read_text() + '[egress.secrets]\nother = "/etc/bot"\n')
    result = explain(file, {"network": ["api.example.com:443"]}, "--config", config)
    assert result.exit_code == EXIT_REFUSED
    assert "network: asked for api.example.com with Authorization of ${bot}, allowed is hosts whose" in result.output
    assert f"{config}:5: [egress.secrets]    # egress.secrets of the daemon's configuration; no policy can" in (
        result.output
    )


def test_every_problem_of_a_policy_is_listed(file: Path) -> None:
    file.write_text("[profiles.a]\nlimits.max.wall_time_s = 'x'\nlimit = 3\n[tenants.y]\n")
    result = run("check", file)
    assert result.exit_code == EXIT_CONFIG
    heading, *problems = result.output.splitlines()
    assert heading == f"The policy {file} can't be used:"
    assert [problem.strip().partition(":")[0] for problem in problems] == [
        "profiles.a.limits.max.wall_time_s",
        "profiles.a.limit",
        "tenants.y.profile",
    ]


def test_a_policy_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    result = run("check", tmp_path / "none.toml")
    assert result.exit_code == EXIT_CONFIG
    assert "none.toml can't be read: No such file or directory." in result.output


def test_with_a_configuration_it_is_checked_what_its_daemon_could_serve(file: Path, config: Path) -> None:
    result = run("check", "--config", config)
    assert result.exit_code == EXIT_CONFIG
    assert "profiles.base.sandbox.images: the configuration has no image 'elsewhere'" in result.output


def test_without_a_file_the_policy_of_the_configuration_is_meant(file: Path, config: Path) -> None:
    file.write_text("[profiles.only]\n")
    assert f"{file} can be used." in run("check", "--config", config).output


def test_without_any_file_the_built_in_policy_is_meant(file: Path) -> None:
    assert run("check").output.startswith("The built-in policy can be used.\nversion      built-in\n")


# -- explain


def test_a_refusal_is_explained_with_file_and_line(file: Path) -> None:
    result = explain(file, {"limits": {"wall_time_s": 101}})
    assert result.exit_code == 1
    assert result.output == (
        "refused to tenant x, profile data, which extends base\n"
        "  limits.wall_time_s: asked for 101, allowed is at most 100 (ABOVE_CEILING)\n"
        f"    {file}:3: limits.max.wall_time_s = 100    # limits.max.wall_time_s of profile base, which data extends\n"
    )


def test_what_is_granted_is_shown(file: Path) -> None:
    result = explain(file, {"limits": {"wall_time_s": 99.5}, "image": "elsewhere"})
    assert result.exit_code == 0
    assert result.output.startswith(
        "granted to tenant x, profile data, which extends base\n  sandbox: image elsewhere,"
    )
    assert "  limits: wall_time_s 99.5," in result.output


def test_a_configuration_says_which_images_there_are(file: Path, config: Path) -> None:
    result = explain(file, {"image": "elsewhere"}, "--config", config)
    assert result.exit_code == 1
    assert "the configuration has no such image" in result.output


def test_a_line_of_the_configuration_is_named_when_that_says_no(file: Path, config: Path) -> None:
    result = explain(file, {"backend": "docker"}, "--config", config)
    assert f'{config}:2: backend = "local"    # server.backend of the daemon\'s configuration' in result.output


def test_the_answer_can_be_had_in_json(file: Path) -> None:
    answer = json.loads(explain(file, {"limits": {"wall_time_s": 101}}, "--json").output)
    assert (answer["granted"], answer["profiles"]) == (None, ["data", "base"])
    (refusal,) = answer["refusals"]
    assert (refusal["file"], refusal["line"], refusal["text"]) == (str(file), 3, "limits.max.wall_time_s = 100")
    assert refusal["violation"] == {
        "field": "limits.wall_time_s",
        "kind": "ABOVE_CEILING",
        "requested": "101",
        "allowed": "at most 100",
        "rule": "profiles.data.limits.max.wall_time_s",
    }
    assert json.loads(explain(file, {}, "--json").output)["granted"]["limits"]["wall_time_s"] == 60.0


def test_the_request_can_come_from_a_file_or_from_stdin(file: Path, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"image": "base"}')
    for request, input_ in ((f"@{tmp_path}/request.json", None), ("-", '{"image": "base"}')):
        assert run("explain", file, "--tenant", "x", "--request", request, input_=input_).exit_code == 0


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"imagse": 1}', "imagse: no such key; available: image, backend"),
        ('{"limits": {"wall_time": 1}}', "limits.wall_time: no such key; available: wall_time_s, cpu_time_s"),
        ('{"execution": [1]}', "execution: must be a table (it is an array of 1)"),
        ('{"put_file": {"size_bytes": -1}}', "put_file.size_bytes: must be greater than or equal to 0 (it is -1)"),
        ('{"language": ["evil"]}', "language.0: must be one of dunder_access"),
        ("@/no/such/file", "can't be read: No such file"),
        ("@/dev/zero", "is not a regular file"),
    ],
)
def test_a_request_that_is_none_is_wrong_usage(file: Path, request_: str, said: str) -> None:
    result = run("explain", file, "--tenant", "x", "--request", request_)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_tenant_that_cannot_be_one_is_wrong_usage(file: Path) -> None:
    assert run("explain", file, "--tenant", "a b", "--request", "{}").exit_code == 2


# -- diff


def test_policies_that_mean_the_same_do_not_differ(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(POLICY.replace("limits.max.wall_time_s = 100", "limits = {max = {wall_time_s = 100.0}}"))
    result = run("diff", file, other)
    assert (result.exit_code, result.output) == (0, "")


def test_what_differs_is_told_with_its_direction(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(POLICY.replace("= 100", "= 200"))
    result = run("diff", file, other)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "profiles.base.limits.max.wall_time_s: 100.0 → 200.0    looser",
        "profiles.data.limits.max.wall_time_s: 100.0 → 200.0    looser",
    ]
    changes: list[dict[str, Any]] = json.loads(run("diff", other, file, "--json").output)
    assert [change["direction"] for change in changes] == ["tighter", "tighter"]


def test_a_policy_that_cannot_be_used_is_not_compared(file: Path, tmp_path: Path) -> None:
    result = run("diff", file, tmp_path / "none.toml")
    assert result.exit_code == EXIT_CONFIG
