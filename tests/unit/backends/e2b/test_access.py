"""The API key comes from a source that no other user can read; an error names the missing or wrong source."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from executor_server.backends.e2b.access import KEY_VARIABLE, open_cloud, read_key
from executor_server.core.config.backend_config import E2BSection
from executor_server.core.errors import SandboxFailure

KEY = "e2b_" + "0" * 40


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def key_file(tmp_path: Path, text: str = KEY, mode: int = 0o600) -> Path:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_holds_the_key(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, f"  {KEY}\n")) == KEY


def test_without_a_file_it_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert read_key(None) == KEY


def test_the_file_takes_precedence_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "e2b_other")
    assert read_key(key_file(tmp_path)) == KEY


def test_the_error_about_a_missing_key_names_the_variable_and_the_setting() -> None:
    with pytest.raises(SandboxFailure, match=f"{KEY_VARIABLE}.*e2b.api_key_file"):
        read_key(None)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SandboxFailure, match="chmod 600") as raised:
        read_key(key_file(tmp_path, mode=mode))
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("text", ["", " \n", "two words", "e2b_\u00e9", "one\ntwo"])
def test_a_text_that_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SandboxFailure, match="holds no API key"):
        read_key(key_file(tmp_path, text))


def test_a_missing_file_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SandboxFailure, match="pipe"):
        read_key(tmp_path / "pipe")
    with pytest.raises(SandboxFailure, match=r"e2b\.api_key_file can't be read: No such file") as caught:
        read_key(tmp_path / "e2b_0123")
    assert "e2b_0123" not in str(caught.value)  # it may be the key, written in place of a file


def test_an_sdk_that_is_too_old_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = pytest.importorskip("executor_server.backends.e2b.cloud")
    monkeypatch.setattr(cloud, "Commands", cloud.Cloud)
    monkeypatch.setattr(cloud.Cloud, "run", lambda self, cmd: None, raising=False)
    with pytest.raises(SandboxFailure, match=r"too old: it has no retain_output.*remote-executor\[e2b\]"):
        open_cloud(E2BSection(api_key_file=key_file(tmp_path)))


def test_a_missing_sdk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "executor_server.backends.e2b.cloud", raising=False)
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxFailure, match=r"remote-executor\[e2b\]"):
        open_cloud(E2BSection(api_key_file=key_file(tmp_path)))
