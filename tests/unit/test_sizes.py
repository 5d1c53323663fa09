"""Sizes like `8GB` are read alike at both ends of the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_api.sizes import bytes_of
from executor_client import InvalidRequest
from executor_client._core.convert import limits_to_wire
from executor_server.core.config import config
from executor_server.core.config.key_types import ConfigError
from executor_server.policy import file

SIZES = {
    "65536": 65_536,
    "8GB": 8 * 10**9,
    "8 gb": 8 * 10**9,
    "8G": 8 * 10**9,
    "512 MiB": 512 * 2**20,
    "512Mi": 512 * 2**20,
    "64k": 64_000,
    "64KiB": 65_536,
    "1.5GiB": 3 * 2**29,
    "2TB": 2 * 10**12,
    "7b": 7,
}
WRONG = [
    "",
    "GB",
    "8XB",
    "-1GB",
    "1e9",
    "8 G B",
    "0.5B",
    "1.0001k B",
    "\u0663GB",
    "1_000",
    "9" * 50,
    "8GBGB",
    "0x10",
    "NaN",
]


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_a_size_is_read(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", WRONG)
def test_a_text_that_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match='like "8GB"'):
        bytes_of(text)


def test_a_client_takes_sizes_as_text() -> None:
    wire = limits_to_wire({"memory_bytes": "8GB", "disk_bytes": "512 MiB", "output_bytes": 7})
    assert wire is not None
    assert (wire.memory_bytes, wire.disk_bytes, wire.output_bytes) == (8 * 10**9, 512 * 2**20, 7)


@pytest.mark.parametrize(("name", "text"), [("memory_bytes", "8XB"), ("wall_time_s", "8GB"), ("processes", "8k")])
def test_a_client_says_which_limit_is_wrong(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"limits.{name} cannot be '{text}'"):
        limits_to_wire({name: text})


def test_configuration_and_policy_take_sizes_as_text(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        'default = "p"\n[profiles.p.limits.max]\nmemory_bytes = "8 GiB"\n[profiles.p.files]\nmax_put_bytes = "64k"\n'
    )
    profile = file.load_policy(path).profiles["p"]
    assert (profile.limits.max.memory_bytes, profile.files.max_put_bytes) == (8 * 2**30, 64_000)
    path.write_text('[audit]\nmax_file_bytes = "4MiB"\n[sessions]\njournal_bytes = "1GB"\n')
    loaded = config.load(path)
    assert (loaded.audit.max_file_bytes, loaded.sessions.journal_bytes) == (4 * 2**20, 10**9)
    assert "journal_bytes = 1000000000" in config.to_toml(loaded)


@pytest.mark.parametrize(
    ("value", "said"), [('"8XB"', 'like "8GB"'), ('"0"', "greater than 0"), ("1.5", "valid integer")]
)
def test_a_wrong_size_in_a_file_is_reported_with_its_key(tmp_path: Path, value: str, said: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[sessions]\njournal_bytes = {value}\n")
    with pytest.raises(ConfigError) as refused:
        config.load(path)
    assert str(refused.value).startswith("sessions.journal_bytes: ") and said in str(refused.value)
