"""A wrong configuration is refused with every problem, and no key needs to be configured."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from executor_server.core.config.backend_config import LocalImage
from executor_server.core.config.config import load, to_toml
from executor_server.core.config.key_types import ConfigError


@pytest.fixture(autouse=True)
def state_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "executor.toml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    return caught.value.problems


def test_nothing_needs_to_be_configured(state_dir: Path) -> None:
    config = load()
    assert config.listen_addresses == (f"unix:{state_dir}/executor.sock", "127.0.0.1:50051")
    assert config.local.images == {"base": LocalImage(python=Path(sys.executable))}
    assert config.policy.file is None
    assert config.sessions.drain_s == 30


def test_the_state_directory_falls_back_to_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EXECUTOR_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert load().server.state_dir == tmp_path / "remote-executor"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load().server.state_dir == tmp_path / ".local/state/remote-executor"


def test_all_problems_are_listed_with_their_keys(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """
        colour = "red"
        [sessions]
        max_sesions = 3
        drain_s = -1
        [pool]
        size = "many"
        [policy]
        file = 3
        [log]
        level = "loud"
        """,
    )
    assert {line.split(":")[0] for line in found} == {
        "colour",
        "sessions.max_sesions",
        "sessions.drain_s",
        "pool.size",
        "policy.file",
        "log.level",
    }
    text = "\n".join(found)
    assert "max_sessions" in text  # a key that the misspelt one could mean
    assert "'debug', 'info', 'warning' or 'error'" in text
    assert "(it is -1)" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[server]\ntls_cert = "/c.pem"', "server: tls_cert and tls_key must be given together"),
        ('[server]\ntls_client_ca = "/c.pem"', "server: tls_client_ca needs tls_cert and tls_key"),
        ('[server]\nstate_dir = "a\\u0000b"', "server.state_dir: must be a path"),
        ("[local]\nimages = {}", "local.images: "),
        ('[local.images]\n"../x" = "/usr/bin/python3"', 'local.images."../x": must be 1 to 64'),
        ("server = 3", "server: "),
        ("[server\n", "is not TOML"),
    ],
)
def test_each_problem_is_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, text)[0]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml can't be read: No such file"):
        load(tmp_path / "missing.toml")


def test_the_audit_log_is_in_the_state_directory_unless_it_has_a_place_of_its_own(tmp_path: Path) -> None:
    assert load(write(tmp_path, '[server]\nstate_dir = "/s"')).audit_directory == Path("/s/audit")
    assert load(write(tmp_path, '[audit]\ndirectory = "/a"')).audit_directory == Path("/a")


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[server]\nlisten = ["127.0.0.1:1"]\nmax_concurrent_calls = 7')
    config = load(path, {"server": {"listen": ["127.0.0.1:2"]}})
    own = f"unix:{config.server.state_dir}/executor.sock"
    assert config.listen_addresses == (own, "127.0.0.1:2")
    assert config.unasked_addresses == {own, "127.0.0.1:50051"}
    assert config.server.max_concurrent_calls == 7


def test_what_is_printed_reads_back_as_the_same(tmp_path: Path) -> None:
    images = '[local.images]\nbase = "/opt/a \\"b\\"/python"\n"py3.12" = "/p"\n'
    config = load(write(tmp_path, images + "[sessions]\njournal_bytes = 10_000_000_000_000"))
    printed = to_toml(config)
    assert load(write(tmp_path, printed)) == config
    assert tomllib.loads(printed)["sessions"]["drain_s"] == 30.0


def test_relative_paths_begin_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "etc/executor.toml"
    file.parent.mkdir()
    file.write_text('policy.file = "policy.toml"\naudit.directory = "~/audit"\n[local.images]\nown = "../envs/own"\n')
    config = load(Path("etc/executor.toml"))
    assert config.policy.file == tmp_path / "etc/policy.toml"
    assert config.audit.directory == Path.home() / "audit"
    assert config.local.images["own"].python == tmp_path / "etc/../envs/own"


def test_without_a_file_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.state_dir: must be an absolute path.*'here'"):
        load(None, {"server": {"state_dir": "here"}})
