"""The packages that modules come from: the shipped table agrees with what is installed here."""

from __future__ import annotations

from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from executor_api.distributions import DISTRIBUTIONS, candidates, is_pythons, likeliest
from executor_server.policy.requirement import read_requirement


def test_every_entry_is_a_package_by_its_canonical_name() -> None:
    assert 60 <= len(DISTRIBUTIONS) <= 120
    for names in DISTRIBUTIONS.values():
        assert names and [read_requirement(name).text for name in names] == list(names)


def test_no_entry_says_what_the_name_itself_does() -> None:
    same = {
        module for module, names in DISTRIBUTIONS.items() if names == (canonicalize_name(module),) and "." not in module
    }
    assert same == set()


def test_the_table_agrees_with_what_is_installed_here() -> None:
    """The metadata of real packages: those of this environment."""
    installed = {
        module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()
    }
    known = {module: set(names) for module, names in DISTRIBUTIONS.items() if module in installed}
    assert known.keys() >= {"PIL", "dateutil", "yaml", "attr", "jwt", "grpc"}
    assert {module: names & installed[module] for module, names in known.items() if not names & installed[module]} == {}


@pytest.mark.parametrize("module", ["os", "os.path", "sqlite3", "_thread", "distutils", "imp", "telnetlib", "cgi.x"])
def test_pythons_own_modules_are_no_packages(module: str) -> None:
    assert is_pythons(module)


def test_no_entry_is_a_module_of_python() -> None:
    assert [module for module in DISTRIBUTIONS if is_pythons(module)] == []


def test_modules_are_named_by_their_likeliest_packages() -> None:
    modules = ["PIL.Image", "cv2", "os.path", "google.protobuf.message", "PIL", "numpy.linalg"]
    assert likeliest(modules) == ["numpy", "opencv-python-headless", "pillow", "protobuf"]


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("sklearn", ("scikit-learn", "sklearn")),
        ("sklearn.linear_model", ("scikit-learn", "sklearn")),
        ("numpy", ("numpy",)),
        ("google", ("google",)),
        ("google.cloud.storage.blob", ("google-cloud-storage", "google")),
        ("mine", ("my-own",)),
        ("mine.part", ("my-part",)),
        ("mine.part.of.it", ("my-part",)),
        ("yaml", ("my-yaml",)),
    ],
)
def test_the_longest_beginning_counts_and_the_policys_table_first(module: str, found: tuple[str, ...]) -> None:
    assert candidates(module, {"mine": "my-own", "mine.part": "my-part", "yaml": "my-yaml"}) == found
