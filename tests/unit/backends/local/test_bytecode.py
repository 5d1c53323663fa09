"""An image without bytecode is reported: each of its sandboxes compiles the packages that it imports."""

from __future__ import annotations

import compileall
import sys
from pathlib import Path

import pytest

from executor_server.backends.local.bytecode import Uncompiled, find_uncompiled
from executor_server.backends.local.host import Examination, report_bytecode
from executor_server.backends.local.images import Image

VERSION = (sys.version_info[0], sys.version_info[1])


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Packages as uv installs them: two with code, and directories that need no compiling."""
    for name, text in (("pandas", "x = 1\n"), ("numpy", "y = 2\n"), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "pandas-1.dist-info").mkdir()
    (tmp_path / "namespace").mkdir()
    (tmp_path / "module.py").write_text("z = 3\n")
    return tmp_path


def _image(packages: Path) -> Image:
    python = packages / "bin/python"
    telltales = (python, packages / "pyvenv.cfg", packages)
    return Image("base", python, VERSION, (), (), (), telltales, "")


def test_packages_without_bytecode_are_reported_with_the_command_to_run(packages: Path) -> None:
    """Importing pandas took two to four seconds in each sandbox, and nothing said why."""
    found = Examination()
    report_bytecode(found, _image(packages))
    (finding,) = found.findings
    assert (finding.subject, finding.ok, finding.required) == ("bytecode of image base", False, False)
    assert f"2 of 2 packages in {packages} have no bytecode (numpy, pandas)" in finding.detail
    assert f"{packages}/bin/python -I -S -m compileall -q {packages} " in finding.remedy


def test_packages_that_the_remedy_compiled_are_not_reported(packages: Path) -> None:
    assert compileall.compile_dir(packages, quiet=2)
    found = Examination()
    report_bytecode(found, _image(packages))
    assert found.findings == []


def test_bytecode_of_another_version_does_not_count(packages: Path) -> None:
    assert compileall.compile_dir(packages, quiet=2)
    other = (VERSION[0], VERSION[1] + 1)
    assert find_uncompiled([packages], other) == [Uncompiled(packages, ("numpy", "pandas"), 2)]


def test_many_packages_are_counted_and_a_few_named(packages: Path) -> None:
    for number in range(10):
        (packages / f"p{number}").mkdir()
        (packages / f"p{number}" / "__init__.py").write_text("1\n")
    found = Examination()
    report_bytecode(found, _image(packages))
    assert "12 of 12 packages" in found.findings[0].detail
    assert "(numpy, p0, p1, p2, p3, …)" in found.findings[0].detail


def test_a_missing_directory_has_no_packages(tmp_path: Path) -> None:
    assert find_uncompiled([tmp_path / "missing"], VERSION) == []
