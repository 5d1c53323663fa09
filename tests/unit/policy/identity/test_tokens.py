"""Tokens: made once, kept as digests, refused alike whatever is wrong with them; and the file that they are in."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result

from executor_server.core.model import Principal
from executor_server.daemon.cli import main
from executor_server.daemon.cli.shared import EXIT_CONFIG, EXIT_PLACE
from executor_server.daemon.cli.token import EXIT_UNKNOWN
from executor_server.policy.identity.token_file import MAX_TOKEN_FILE_BYTES, TokenFile, TokenFileError, TokenRecord
from executor_server.policy.identity.tokens import LOCAL_PRINCIPAL, Tokens
from tests.support.fork_server import SERVER, popen

LOCAL_TOKEN = "l" * 43
SECOND = timedelta(seconds=1)


@dataclass
class Clock:
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


def accepted(tokens: Tokens, token: str) -> Principal | None:
    token_id = tokens.id_of(token)
    return None if token_id is None else tokens.principal_of_id(token_id)


# -- tokens


def test_a_token_is_its_tenants(file: TokenFile) -> None:
    record, token = file.new("acme", "ci", admin=True)
    assert accepted(Tokens(LOCAL_TOKEN, file), token) == Principal("acme", f"token:ci:{record.id}", is_admin=True)


def test_a_tenant_can_have_several_tokens(file: TokenFile) -> None:
    made = [file.new("acme", "ci")[1] for _ in range(3)]
    tokens = Tokens(LOCAL_TOKEN, file)
    assert len(set(made)) == 3
    assert {principal.tenant for token in made if (principal := accepted(tokens, token))} == {"acme"}


def test_the_single_users_token_stays_what_it_was(file: TokenFile) -> None:
    assert accepted(Tokens(LOCAL_TOKEN, file), LOCAL_TOKEN) == LOCAL_PRINCIPAL
    assert accepted(Tokens(LOCAL_TOKEN), LOCAL_TOKEN) == LOCAL_PRINCIPAL


def test_the_secret_is_in_no_file(file: TokenFile) -> None:
    record, token = file.new("acme", "ci")
    secret = token.partition(f"{record.id}_")[2]  # the secret may contain an underscore itself
    assert secret
    assert all(secret.encode() not in path.read_bytes() for path in file.path.parent.iterdir())


WRONG: dict[str, Callable[[str, str], str]] = {
    "nothing": lambda mine, theirs: "",
    "a character less": lambda mine, theirs: mine[:-1],
    "another last character": lambda mine, theirs: mine[:-2] + ("A" if mine[-2] != "A" else "B") + mine[-1],
    "another tenant's id": lambda mine, theirs: theirs[:17] + mine[17:],
    "an id that nobody has": lambda mine, theirs: "ret_aaaaaaaaaaaa_" + mine[17:],
    "a megabyte": lambda mine, theirs: mine + "A" * 1_000_000,
    "letters that are not ASCII": lambda mine, theirs: mine[:-1] + "ä",
    "half a surrogate pair": lambda mine, theirs: mine[:-1] + "\ud800",
    "a newline after it": lambda mine, theirs: mine + "\n",
    "a NUL in it": lambda mine, theirs: mine[:-1] + "\0",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_token_is_nobodys(file: TokenFile, how: str) -> None:
    mine, theirs = file.new("mine", "x")[1], file.new("theirs", "x")[1]
    assert accepted(Tokens(LOCAL_TOKEN, file), WRONG[how](mine, theirs)) is None


def test_a_token_that_expired_a_second_ago_is_nobodys(file: TokenFile) -> None:
    clock = Clock()
    _, token = file.new("acme", "ci", expire_time=clock.time + SECOND)
    tokens = Tokens(LOCAL_TOKEN, file, clock)
    assert accepted(tokens, token) is not None
    clock.time += 2 * SECOND
    assert tokens.id_of(token) is None


def test_a_token_ends_at_the_moment_that_it_says(file: TokenFile) -> None:
    clock = Clock()
    record, _ = file.new("acme", "ci", expire_time=clock.time + SECOND)
    tokens = Tokens(LOCAL_TOKEN, file, clock)
    clock.time += SECOND
    assert tokens.principal_of_id(record.id) is None


# -- a file that changes


def failing_open(*_args: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_what_changes_in_the_file_counts_without_a_restart(file: TokenFile) -> None:
    tokens = Tokens(LOCAL_TOKEN, file)
    record, token = file.new("acme", "ci")
    assert accepted(tokens, token) is None
    await tokens.refresh()
    assert accepted(tokens, token) is not None
    file.revoke(record.id)
    await tokens.refresh()
    assert accepted(tokens, token) is None


async def test_a_file_that_is_gone_is_no_tokens(file: TokenFile) -> None:
    _, token = file.new("acme", "ci")
    tokens = Tokens(LOCAL_TOKEN, file)
    file.path.unlink()
    await tokens.refresh()
    assert accepted(tokens, token) is None
    assert accepted(tokens, LOCAL_TOKEN) == LOCAL_PRINCIPAL


async def test_a_file_that_goes_bad_changes_nothing_and_is_told_once(file: TokenFile) -> None:
    _, token = file.new("acme", "ci")
    tokens = Tokens(LOCAL_TOKEN, file)
    file.path.write_text("[{")
    with structlog.testing.capture_logs() as logged:
        await tokens.refresh()
        await tokens.refresh()
    assert [(entry["event"], entry["log_level"]) for entry in logged] == [("token_file_refused", "error")]
    assert accepted(tokens, token) is not None


async def test_a_file_that_is_mended_counts_again(file: TokenFile) -> None:
    record, token = file.new("acme", "ci")
    tokens = Tokens(LOCAL_TOKEN, file)
    file.path.chmod(0o640)
    await tokens.refresh()
    file.path.chmod(0o600)
    file.revoke(record.id)
    await tokens.refresh()
    assert accepted(tokens, token) is None


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_failed_reading_keeps_no_revoked_token_alive(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """The daemon may be out of descriptors for a moment. The file was then not read again until its next change."""
    record, token = file.new("acme", "ci")
    tokens = Tokens(LOCAL_TOKEN, file)
    file.revoke(record.id)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing_open)
        await tokens.refresh()
    if is_removed:
        file.path.unlink()
    await tokens.refresh()
    assert accepted(tokens, token) is None


async def test_a_malformed_file_is_read_once(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call with a wrong token refreshes, and a file may have megabytes."""
    tokens = Tokens(LOCAL_TOKEN, file)
    file.path.touch(0o600)
    file.path.write_text("[{")
    await tokens.refresh()
    monkeypatch.setattr(os, "open", failing_open)
    with structlog.testing.capture_logs() as logged:
        await tokens.refresh()
    assert not logged


async def test_who_asks_for_a_reload_and_goes_away_keeps_no_revoked_token_alive(file: TokenFile) -> None:
    record, token = file.new("acme", "ci")
    tokens = Tokens(LOCAL_TOKEN, file)
    file.revoke(record.id)
    asked = asyncio.create_task(tokens.reload())
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await tokens.refresh()
    assert accepted(tokens, token) is None


async def test_readings_take_turns_so_that_an_earlier_one_has_not_the_last_word(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(LOCAL_TOKEN, file)
    at_work: list[int] = []
    together: list[int] = []
    read = file.read

    def slow_read() -> tuple[TokenRecord, ...]:
        at_work.append(1)
        threading.Event().wait(0.01)  # time enough for another to come
        together.append(len(at_work))
        at_work.pop()
        return read()

    monkeypatch.setattr(file, "read", slow_read)
    await asyncio.gather(*(tokens.reload() for _ in range(5)))
    assert together == [1] * 5


async def test_who_asks_for_a_reload_is_told_what_is_wrong(file: TokenFile) -> None:
    file.new("acme", "ci")
    tokens = Tokens(LOCAL_TOKEN, file)
    assert await tokens.reload() is False
    file.new("acme", "ci")
    assert await tokens.reload() is True
    file.path.write_text("[{")
    with pytest.raises(TokenFileError, match="is not what `executor-server token` writes"):
        await tokens.reload()


# -- files that are not used


def written(file: TokenFile, content: object) -> None:
    file.path.write_text(json.dumps(content))
    file.path.chmod(0o600)


def entry(**changes: Any) -> dict[str, Any]:
    plain = {"id": "a" * 12, "tenant": "t", "name": "n", "digest": "0" * 64, "create_time": "2026-01-01T00:00:00Z"}
    return {**plain, **changes}


@pytest.mark.parametrize(
    "content",
    [
        {},
        [entry(id="a")],
        [entry(tenant="../x")],
        [entry(create_time="2026-01-01T00:00:00")],
        [entry(admin="yes")],
        [entry(secret="s")],
    ],
)
def test_a_malformed_file_is_refused(file: TokenFile, content: object) -> None:
    written(file, content)
    with pytest.raises(TokenFileError, match=r"is not what `executor-server token` writes: .+\."):
        file.read()


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]" + b"x"])
def test_a_file_that_is_not_json_is_refused(file: TokenFile, data: bytes) -> None:
    written(file, [])
    file.path.write_bytes(data)
    with pytest.raises(TokenFileError, match="is not what `executor-server token` writes"):
        file.read()


def test_a_token_in_the_place_of_its_digest_is_not_told_to_the_log(file: TokenFile) -> None:
    written(file, [entry(digest="ret_secret")])
    with pytest.raises(TokenFileError) as refused:
        file.read()
    assert "ret_secret" not in str(refused.value)


def test_two_tokens_of_one_id_are_refused(file: TokenFile) -> None:
    written(file, [entry(), entry(tenant="u")])
    with pytest.raises(TokenFileError, match="two tokens with one id"):
        file.read()


def test_a_file_without_end_is_refused(file: TokenFile) -> None:
    written(file, [])
    os.truncate(file.path, MAX_TOKEN_FILE_BYTES + 1)
    with pytest.raises(TokenFileError, match="is larger than"):
        file.read()


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(file: TokenFile, mode: int) -> None:
    file.new("acme", "ci")
    file.path.chmod(mode)
    with pytest.raises(TokenFileError, match=r"can be read or written by other users; run: chmod 600 "):
        file.read()


def test_a_file_in_a_directory_that_others_can_write_is_refused(file: TokenFile) -> None:
    file.new("acme", "ci")
    file.path.parent.chmod(0o777)
    with pytest.raises(TokenFileError, match=r"run: chmod go-w "):
        file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_refused(file: TokenFile) -> None:
    file.new("acme", "ci")
    os.chown(file.path, 12345, 12345)
    with pytest.raises(TokenFileError, match="belongs to user 12345"):
        file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_in_another_users_directory_is_refused(file: TokenFile) -> None:
    file.new("acme", "ci")
    os.chown(file.path.parent, 12345, 12345)
    version = file.version()
    with pytest.raises(TokenFileError, match="in a directory of user 12345, who could replace it"):
        file.read()
    os.chown(file.path.parent, 0, 12345)
    assert file.version() != version  # so the daemon reads it again


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_changes_stays_the_daemons_users(file: TokenFile) -> None:
    os.chown(file.path.parent, 12345, 12346)
    file.new("acme", "ci")
    assert (file.path.stat().st_uid, file.path.stat().st_gid) == (12345, 12346)


def test_a_link_is_not_followed(file: TokenFile, tmp_path: Path) -> None:
    TokenFile(tmp_path / "real.json").new("acme", "ci")
    file.path.symlink_to(tmp_path / "real.json")
    with pytest.raises(TokenFileError, match="symbolic link"):
        file.read()


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: os.mkfifo(path, 0o600)])
def test_what_is_no_file_is_refused(file: TokenFile, make: Callable[[Path], None]) -> None:
    make(file.path)
    with pytest.raises(TokenFileError, match="is not a regular file"):
        file.read()


def test_a_bad_file_is_not_overwritten(file: TokenFile) -> None:
    written(file, {"mine": 1})
    with pytest.raises(TokenFileError):
        file.new("acme", "ci")
    assert json.loads(file.path.read_text()) == {"mine": 1}


# -- writing


def test_the_file_is_private_and_nothing_lies_beside_it(file: TokenFile) -> None:
    file.new("acme", "ci")
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in file.path.parent.iterdir()} == {"tokens.json", "tokens.json.lock"}


def test_a_disk_that_is_full_leaves_the_file_as_it_was(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file.new("acme", "ci")
    before = file.path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TokenFileError, match="can't be written: No space left on device"):
        file.new("acme", "ci")
    assert file.path.read_bytes() == before
    assert {path.name for path in file.path.parent.iterdir()} == {"tokens.json", "tokens.json.lock"}


def test_writers_at_one_time_lose_nothing(file: TokenFile) -> None:
    command = [*SERVER, "token", "new", "--tenant", "acme", "--state-dir", str(file.path.parent)]
    writers = [popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in "1234"]
    made = {writer.communicate(timeout=60)[0].decode().strip() for writer in writers}
    tokens = Tokens(LOCAL_TOKEN, file)
    assert len(made) == 4
    assert all(tokens.id_of(token) is not None for token in made)


# -- the commands


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner(catch_exceptions=False).invoke(main, ["token", *arguments, "--state-dir", str(tmp_path)])

    return run


Run = Callable[..., Result]


def test_a_new_token_is_all_of_stdout(run: Run, file: TokenFile) -> None:
    made = run("new", "--tenant", "acme", "--expires", "30d")
    assert accepted(Tokens(LOCAL_TOKEN, file), made.stdout.removesuffix("\n")) is not None
    assert "not shown again" in made.stderr


def test_the_list_shows_what_there_is_and_no_secret(run: Run) -> None:
    token = run("new", "--tenant", "acme", "--name", "ci", "--admin").stdout.strip()
    run("new", "--tenant", "other")
    listed = run("list", "--tenant", "acme").stdout
    assert [line.split()[:4] for line in listed.splitlines()[1:]] == [[token[4:16], "acme", "ci", "yes"]]
    assert token[17:] not in listed


def test_the_list_shows_roles_and_an_admin_is_given_none(run: Run) -> None:
    run("new", "--tenant", "acme")
    run("new", "--tenant", "acme", "--role", "user", "--role", "approver")
    refused = run("new", "--tenant", "acme", "--admin", "--role", "viewer")
    assert (refused.exit_code, "--admin includes every role" in refused.stderr) == (2, True)
    listed = [" ".join(line.split()[3:-6]) for line in run("list").stdout.splitlines()[1:]]
    assert [row.rpartition(" 20")[0] for row in listed] == ["no user", "no user, approver"]


def test_a_revoked_token_is_shown_as_revoked_and_is_nobodys(run: Run, file: TokenFile) -> None:
    token = run("new", "--tenant", "acme").stdout.strip()
    assert run("revoke", token[4:16]).exit_code == 0
    assert run("revoke", token[4:16]).exit_code == 0
    assert "revoked at" in run("list").stdout
    assert accepted(Tokens(LOCAL_TOKEN, file), token) is None


def test_what_is_not_there_cannot_be_revoked(run: Run) -> None:
    refused = run("revoke", "nothing")
    assert (refused.exit_code, refused.stdout) == (EXIT_UNKNOWN, "")
    assert "No token with this id" in refused.stderr


@pytest.mark.parametrize("lifetime", ["", "0d", "1y", "99999999999d", "3651d", "\u0661d"])
def test_a_lifetime_that_means_nothing_is_refused(run: Run, file: TokenFile, lifetime: str) -> None:
    refused = run("new", "--tenant", "acme", "--expires", lifetime)
    assert refused.exit_code == 2
    assert "must be like 90m" in refused.stderr
    assert not file.path.exists()


@pytest.mark.parametrize("name", ["", "../a"])
def test_a_tenant_that_is_no_name_is_refused(run: Run, file: TokenFile, name: str) -> None:
    assert run("new", f"--tenant={name}").exit_code == 2
    assert not file.path.exists()


def test_a_file_that_cannot_be_used_is_told_in_a_sentence(run: Run, file: TokenFile) -> None:
    written(file, {})
    for command in (("new", "--tenant", "acme"), ("list",), ("revoke", "x")):
        refused = run(*command)
        assert refused.exit_code == EXIT_PLACE
        assert refused.stderr.startswith("The token file ")


def test_a_tenant_that_the_policy_does_not_know_is_told(run: Run, tmp_path: Path) -> None:
    policy, config = tmp_path / "policy.toml", tmp_path / "config.toml"
    policy.write_text('[profiles.p]\n[tenants.known]\nprofile = "p"\n')
    config.write_text(f'[policy]\nfile = "{policy}"\n')
    unknown, known = (run("new", "--tenant", tenant, "--config", str(config)) for tenant in ("acme", "known"))
    assert "[tenants.acme]" in unknown.stderr
    assert "[tenants." not in known.stderr
    assert unknown.stdout.startswith("ret_")


def test_no_token_is_made_under_a_policy_that_cannot_be_read(run: Run, tmp_path: Path, file: TokenFile) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[policy]\nfile = "{tmp_path / "missing.toml"}"\n')
    assert run("new", "--tenant", "acme", "--config", str(config)).exit_code == EXIT_CONFIG
    assert not file.path.exists()
