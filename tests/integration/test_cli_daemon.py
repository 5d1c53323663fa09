"""`executor-server` as a user runs it: what it says and how it exits."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.support import fork_server
from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.e2b import ThreadedDouble

TIMEOUT_S = 60.0


def server(*arguments: str) -> tuple[int, str, str]:
    ran = fork_server.server(*arguments)
    return ran.returncode, ran.stdout, ran.stderr


def test_check_host_answers_in_sentences() -> None:
    require("local")
    code, out, err = server("check-host")
    assert (code, err) == (0, "")
    *findings, verdict = out.splitlines()
    assert verdict == "The local backend can serve on this host."
    assert any("network namespace" in finding for finding in findings)
    assert "     ok  network: The egress proxy runs: a connection was made through it." in findings
    assert not any("MISSING" in finding for finding in findings)


def test_check_host_says_what_is_missing_and_exits_with_1(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[local]\nbwrap = "/nonexistent/bwrap"\n')
    code, out, err = server("check-host", "--config", str(config))
    assert code == 1
    assert "MISSING  bubblewrap" in out and "apt-get install bubblewrap" in out
    assert err == "The local backend can't serve on this host: bubblewrap.\n"
    code, _, err = server("serve", "--config", str(config), "--state-dir", str(tmp_path / "s"))
    assert code == 1 and "apt-get install bubblewrap" in err and "Traceback" not in err


def test_check_host_says_if_a_host_with_e2b_alone_can_make_environments(tmp_path: Path) -> None:
    require("e2b")
    require("local")
    config = tmp_path / "c.toml"
    with ThreadedDouble() as double:
        cloud = f'e2b.api_url = "{double.url}"\ne2b.sandbox_url = "{double.url}"\ne2b.api_key_file = "{double.api_key_file}"\n'
        config.write_text(f'server.backend = "e2b"\n{cloud}')
        code, out, _ = server("check-host", "--config", str(config))
        assert code == 0 and "ok  packages: This host can make the environments" in out
        config.write_text(f'server.backend = "e2b"\n{cloud}local.bwrap = "/nonexistent/bwrap"\n')
        code, out, _ = server("check-host", "--config", str(config))
        assert code == 0 and "weaker  packages: No session can have packages" in out and "(bubblewrap)" in out
        config.write_text(f'server.backend = "e2b"\nserver.other_backends = ["local"]\n{cloud}')
        assert "packages" not in server("check-host", "--config", str(config))[1]


def test_print_config_is_a_configuration(tmp_path: Path) -> None:
    code, out, _ = server("print-config", "--listen", "127.0.0.1:7", "--state-dir", str(tmp_path))
    printed = tomllib.loads(out)
    assert (code, printed["server"]["listen"], printed["server"]["state_dir"]) == (0, ["127.0.0.1:7"], str(tmp_path))
    config = tmp_path / "c.toml"
    config.write_text(out)
    assert server("print-config", "--config", str(config))[1] == out


def test_a_wrong_configuration_is_told_problem_by_problem(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[pool]\nsize = -1\n[sessions]\nmax_sesions = 3\n")
    code, out, err = server("serve", "--config", str(config))
    assert (code, out) == (3, "")
    first, *problems = err.splitlines()
    assert first == "The configuration can't be used:"
    assert [problem.split(":")[0] for problem in problems] == ["  pool.size", "  sessions.max_sesions"]


def test_a_pool_of_what_no_session_could_get_is_a_wrong_configuration(tmp_path: Path) -> None:
    require("local")
    config = tmp_path / "c.toml"
    config.write_text(
        f'server.state_dir = "{tmp_path}/s"\n[[pool.warm]]\nimage = "nope"\nsize = 1\n'
        f'[[pool.warm]]\nimage = "base"\nsize = 1\nmemory_bytes = {10**15}\n'
    )
    code, out, err = server("serve", "--config", str(config))
    assert (code, out) == (3, "")
    _, unknown, greedy = err.splitlines()
    assert unknown == "  pool.warm.0: no image 'nope'; available: base (it is 'nope')"
    assert greedy.startswith("  pool.warm.1: the policy refuses this: limits.memory_bytes")


def test_a_second_daemon_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    listen = f"unix:{daemon.state_dir / 'other.sock'}"
    code, out, err = server("serve", "--state-dir", str(daemon.state_dir), "--listen", listen)
    assert (code, out) == (4, "")
    assert err.startswith("Another executor-server is running with the state directory") and err.count("\n") == 1
    with daemon.client() as client, client.create_session() as session:
        assert session.execute("6 * 7").output == 42


def test_an_address_in_use_is_refused_and_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    code, out, err = server("serve", "--state-dir", str(tmp_path / "s"), "--listen", daemon.address)
    assert (code, out) == (4, "")
    assert str(daemon.state_dir / "executor.sock") in err and "Traceback" not in err


def test_an_open_address_without_tls_is_refused(tmp_path: Path) -> None:
    code, _, err = server("serve", "--state-dir", str(tmp_path / "s"), "--listen", "0.0.0.0:50051")
    assert code == 4
    assert "Set server.tls_cert and server.tls_key" in err and "Traceback" not in err
