"""The command line says what is wrong in sentences, and with an exit code of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from executor_server.backends.base import HostFinding
from executor_server.core.config.state_dir import claim
from executor_server.daemon import daemon
from executor_server.daemon.cli import LATE_GROUPS, main
from executor_server.daemon.cli.shared import EXIT_CONFIG, EXIT_HOST, EXIT_PLACE
from tests.support.fork_server import server


def run(*arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, arguments)


def test_help_imports_no_module_of_the_policy_or_the_audit_log() -> None:
    """They and structlog cost as much CPU time as everything else that the command line imports."""
    program = (
        "import sys; from executor_server.daemon.cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit(' '.join(m for m in sys.modules if m in "
        "('structlog', 'executor_server.policy', 'executor_server.policy.audit', 'executor_server.policy.identity')) or 0)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.stderr, shown.returncode) == ("", 0)
    assert all(f"  {name} " in shown.stdout for name in LATE_GROUPS)


@pytest.mark.parametrize("name", LATE_GROUPS)
def test_a_group_that_is_imported_late_has_the_help_that_is_shown_before(name: str) -> None:
    group = getattr(import_module(f"executor_server.daemon.cli.{name}"), name)
    assert group.help == LATE_GROUPS[name]
    assert run(name, "--help").output.count(LATE_GROUPS[name]) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        'egress.upstream_proxy = "http://me:pa55word@proxy.example:3128"',
        'egress.upstream_proxy = "me:pa55word@proxy.example:3128"',
        'egress.secrets = { bot = ["pa55word"] }',
        'egress.secrets = "pa55word"',
        'environments.index_url = "https://me:pa55word@packages.example/simple"',
        'environments.index_authorization = "Basic pa55word"',
        'tracing.endpoint = "htps://me:pa55@word@collector.example"',
        'egress = "http://me:pa55word@proxy.example:3128"',
    ],
)
def test_secret_in_a_wrong_configuration_is_not_repeated(tmp_path: Path, wrong: str) -> None:
    (config := tmp_path / "executor.toml").write_text(wrong)
    result = run("print-config", "--state-dir", str(tmp_path), "--config", str(config))
    assert result.exit_code == EXIT_CONFIG
    assert wrong.partition(" ")[0].partition(".")[0] in result.output
    assert "pa55" not in result.output
    assert "word" not in result.output.replace("a password", "")


def test_print_config_hides_the_password_of_a_url(tmp_path: Path) -> None:
    (config := tmp_path / "executor.toml").write_text('tracing.endpoint = "https://me:pa55word@collector.example/v1"')
    result = run("print-config", "--state-dir", str(tmp_path), "--config", str(config))
    assert result.exit_code == 0
    assert 'endpoint = "https://…@collector.example/v1"' in result.output
    assert "pa55word" not in result.output
    config.write_text(result.output)
    result = run("print-config", "--state-dir", str(tmp_path), "--config", str(config))
    assert result.exit_code == EXIT_CONFIG, "a hidden password is not taken for one"


def test_print_config_changes_no_other_address(tmp_path: Path) -> None:
    lines = ('tracing.endpoint = "https://collector.example/v1@2"', 'docker.host = "ssh://me@box"')
    (config := tmp_path / "executor.toml").write_text("\n".join(lines))
    result = run("print-config", "--state-dir", str(tmp_path), "--config", str(config))
    assert '"https://collector.example/v1@2"' in result.output
    assert '"ssh://me@box"' in result.output


def test_print_config_shows_what_is_in_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[pool]\nsize = 7\n")
    monkeypatch.setenv("EXECUTOR_CONFIG", str(config))
    result = run("print-config", "--state-dir", str(tmp_path), "--listen", "127.0.0.1:1")
    shown = tomllib.loads(result.output)
    assert (shown["pool"]["size"], shown["server"]["listen"]) == (7, ["127.0.0.1:1"])
    assert shown["server"]["state_dir"] == str(tmp_path)


@pytest.mark.parametrize("arguments", [["print-config"], ["--version"], ["token", "--help"]])
def test_a_full_disk_for_the_output_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with Path("/dev/full").open("w") as full, pytest.raises(SystemExit, match=str(EXIT_PLACE)):
        monkeypatch.setattr(sys, "stdout", full)
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("A file or the output can't be written: No space left on device; free some space")


def test_a_wrong_configuration_is_told_problem_by_problem(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[pool]\nsize = "x"\nsise = 1\n')
    result = run("serve", "--config", str(config))
    assert result.exit_code == EXIT_CONFIG
    assert "pool.size: " in result.output
    assert "pool.sise: no such key" in result.output


def test_a_daemon_can_be_given_its_policy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is refused packages names this option, so that one file is enough to allow them."""
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text("default = 'default'\n[profiles.default.packages]\nallowed = ['x @ file:///x']\n")
    result = run("serve", "--state-dir", str(tmp_path / "s"), "--policy", "policy.toml")
    assert result.exit_code == EXIT_CONFIG
    assert "profiles.default.packages.allowed.0: is a URL" in result.output


def test_an_address_that_others_could_reach_is_refused(tmp_path: Path) -> None:
    result = run("serve", "--state-dir", str(tmp_path / "s"), "--listen", "0.0.0.0:50051")
    assert result.exit_code == EXIT_PLACE
    assert "tls_cert" in result.output
    assert not (tmp_path / "s").exists()


def test_a_second_daemon_of_one_state_directory_is_refused(tmp_path: Path) -> None:
    with claim(tmp_path / "s"):
        second = server("serve", "--state-dir", str(tmp_path / "s"))
    assert second.returncode == EXIT_PLACE
    assert second.stderr.startswith("Another executor-server is running")
    assert second.stderr.count("\n") == 1


@pytest.mark.parametrize(("required", "exit_code", "word"), [(True, EXIT_HOST, "MISSING"), (False, 0, "weaker")])
def test_check_host_says_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, required: bool, exit_code: int, word: str
) -> None:
    findings = [
        HostFinding("process limit", True, "By control groups."),
        HostFinding("memory limit", False, "Nobody counts.", "Delegate a cgroup.", required=required),
    ]
    monkeypatch.setattr(daemon, "check_host", lambda config, backend: findings)
    result = run("check-host")
    assert result.exit_code == exit_code
    assert f"{word}  memory limit: Nobody counts." in result.output
    assert "Delegate a cgroup." in result.output


def test_check_host_checks_all_that_are_configured_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    findings = {
        "local": [HostFinding("user namespace", True, "There is one.")],
        "docker": [HostFinding("Engine", False, "Nobody listens.")],
    }
    monkeypatch.setattr(daemon, "check_host", lambda config, backend: findings[backend])
    config = tmp_path / "executor.toml"
    config.write_text("[server]\nother_backends = ['docker']\n")
    both = run("check-host", "--config", str(config))
    assert both.exit_code == EXIT_HOST
    assert "The local backend can serve on this host." in both.output
    assert "The docker backend can't serve on this host: Engine." in both.output
    assert run("check-host", "--config", str(config), "--backend", "local").exit_code == 0


@pytest.mark.parametrize("command", ["serve", "print-config"])
def test_the_garbage_collector_is_off_while_modules_are_imported_and_on_when_the_command_runs(command: str) -> None:
    program = (
        "import gc, sys; sys.argv[1:] = [sys.argv[1]]; import executor_server.__main__ as command; "
        "print(gc.isenabled()); "
        "from executor_server.daemon import daemon; from executor_server.daemon import cli; "
        "see = lambda *_: print(gc.isenabled(), gc.get_freeze_count() > 10_000) or ''; "
        "daemon.serve = daemon.check_host = cli.to_toml = see; command.main(standalone_mode=False)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.stderr.count("Traceback"), shown.stdout.split()[:3]) == (0, ["False", "True", "True"])
