"""uv is found, placed and understood."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from executor_server.core import Progress
from executor_server.packages.uv import (
    ForeignPython,
    Listener,
    Uv,
    UvMissing,
    compile_command,
    environment,
    find_uv,
    install_command,
    place_uv,
)


def test_the_daemons_own_uv_is_found_and_answers() -> None:
    found = find_uv()
    assert found.path.is_absolute() and found.version[0].isdigit()
    assert find_uv(found.path) == found


def test_a_configured_program_that_is_no_uv_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UvMissing, match="/bin/true cannot be used: it does not answer like uv"):
        find_uv(Path("/bin/true"))
    with pytest.raises(UvMissing, match="absent"):
        find_uv(tmp_path / "absent")


def test_it_is_placed_as_a_copy_that_no_user_can_change(tmp_path: Path) -> None:
    original, programs = tmp_path / "original", tmp_path / "programs"
    programs.mkdir()
    original.write_text("first")
    place_uv(Uv(original, "1"), programs)
    placed = programs / "uv"
    assert stat.S_IMODE(placed.stat().st_mode) == 0o555 and placed.stat().st_ino != original.stat().st_ino
    original.write_text("another")
    place_uv(Uv(original, "2"), programs)
    assert placed.read_text() == "another"
    assert [path.name for path in programs.iterdir()] == ["uv"]


def test_nothing_of_the_daemons_environment_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX", "https://elsewhere.example")
    given = environment()
    assert "elsewhere" not in repr(given)
    assert (given["UV_NO_CONFIG"], given["UV_PYTHON_DOWNLOADS"]) == ("1", "never")


def test_nothing_is_built_and_everything_is_hashed() -> None:
    install = install_command(["/run/executor/programs/wheels/aa"], "/run/executor/work/site", None)
    assert {"--require-hashes", "--no-build", "--no-deps", "--offline", "--no-index"} <= set(install)
    assert "--find-links=/run/executor/programs/wheels/aa" in install
    resolve = compile_command("https://index.example/simple", 86_400.0, ForeignPython("3.12", "x86_64-manylinux_2_28"))
    assert {"--generate-hashes", "--no-build", "--exclude-newer"} <= set(resolve) and "--no-deps" not in resolve
    assert resolve[resolve.index("--python-platform") + 1] == "x86_64-manylinux_2_28"
    assert "--no-deps" in compile_command("https://index.example/simple", None, None, is_locked=True)


def test_progress_is_read_from_what_it_says() -> None:
    listener = Listener("installing", total=23)
    said = [
        "Resolved 23 packages in 1ms",
        "Prepared 23 packages in 2.31s",
        " + numpy==2.5.5",
        "Installed 23 packages in 1s",
    ]
    assert [listener.take(line) for line in said] == [None, None, None, Progress("installing", 23, 23, "packages")]
    assert str(listener.progress(22)) == "installing, 22 of 23 packages"
    assert listener.progress(10**6) == Progress("installing", 23, 23, "packages")


def test_an_explanation_names_no_address_and_no_path_and_is_cut() -> None:
    listener = Listener("resolving")
    for line in (
        "Using CPython 3.11.7 interpreter at: /root/x/bin/python",
        "\x1b[31merror\x1b[0m: Failed to fetch: `https://user:secret@index.example/simple/x/`",
        "  cause: failed to open /run/executor/work/cache/.tmpA/x (os error 13)",
        *(f"line {n}" for n in range(100)),
    ):
        listener.take(line)
    text = listener.explanation
    assert text.startswith(
        "error: Failed to fetch: `the index`\n  cause: failed to open (a file of the build) (os error"
    )
    assert "index.example" not in text and "secret" not in text and "/run" not in text and "\x1b" not in text
    assert len(text.splitlines()) == 30 and text.endswith(" ...")
