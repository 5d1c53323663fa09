"""Failures to reach an address carry a note that the sandbox has no network, and show the program's own lines."""

from __future__ import annotations

import errno
import linecache
import socket
import subprocess
import sys

import pytest

from executor_server.guest.checks.failures import describe
from executor_server.guest.checks.offline import (
    NO_NETWORK,
    NOT_INSTALLED,
    is_install,
    is_offline,
    missing_package,
    note,
    says_not_installed,
    says_offline,
)
from tests.support.agent_program import Agent

UNKNOWN = "Name or service not known"
PROGRAMS = {
    "socket": "import socket\nsocket.create_connection(('pypi.org', 443))",
    "urllib": "import urllib.request\nurllib.request.urlopen('https://pypi.org')",
    "http": "import http.client\nhttp.client.HTTPSConnection('pypi.org').request('GET', '/')",
    "requests": "import requests\nrequests.get('https://pypi.org')",
    "httpx": "import httpx\nhttpx.get('https://pypi.org')",
    "pandas": "import pandas\npandas.read_csv('https://pypi.org/x.csv')",
    "raised anew": "import requests\ndef load():\n    try:\n        return requests.get('https://pypi.org')\n"
    "    except OSError as e:\n        raise ValueError('no data') from e\nload()",
}


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all names unknown, as in a sandbox."""

    def getaddrinfo(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, UNKNOWN)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_the_note_stands_once_under_a_short_traceback_with_the_program_s_own_lines(name: str) -> None:
    """The traceback had sixty lines of libraries and did not mention the sandbox."""
    source = PROGRAMS[name]
    filename = "<execution-1>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    error = Agent().run(source).error
    assert error is not None
    detail = describe(error, filename, source, [[1, 99]])
    assert detail.message.count(NO_NETWORK) == detail.traceback.count(NO_NETWORK) == 1
    assert detail.traceback.endswith(f"{NO_NETWORK}\n")
    assert detail.traceback.splitlines()[-2].endswith(detail.message.splitlines()[-2])
    own = [line for line in source.splitlines() if "pypi.org" in line or line == "load()"]
    assert all(line.strip() in detail.traceback for line in own)
    assert len(detail.traceback.splitlines()) <= 24, "as much as the client shows"
    assert detail.line > 0


@pytest.mark.parametrize(
    ("error", "offline"),
    [
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (socket.gaierror(socket.EAI_SERVICE, "Servname not supported"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (OSError("text only"), False),
        (ValueError("Network is unreachable"), False),
    ],
)
def test_only_failures_that_a_network_would_have_prevented_count(error: BaseException, offline: bool) -> None:
    assert is_offline(error) is offline


def test_chains_are_followed_and_end_whatever_they_are() -> None:
    first = OSError(errno.ENETUNREACH, "unreachable")
    second, third = ValueError(), KeyError()
    second.__context__, third.__cause__ = first, second
    assert is_offline(third)
    one, other = ValueError(), ValueError()
    one.__cause__, other.__context__ = other, one
    assert not is_offline(one)


def test_an_exception_of_odd_attributes_is_described() -> None:
    source = "class Odd(Exception):\n    @property\n    def exceptions(self): raise OSError(101)\nraise Odd('odd')"
    error = Agent().run(source).error
    assert error is not None
    assert describe(error, "<execution-1>", source, []).message == "odd"


def test_the_failure_is_found_in_output() -> None:
    assert says_offline(b"curl: (6) Could not resolve host: pypi.org\n")
    assert says_offline(f"<urlopen error [Errno -2] {UNKNOWN}>".encode())
    assert not says_offline(b"all is well")


PIP = b"ERROR: Could not find a version that satisfies the requirement polars (from versions: none)\n"


def test_a_package_that_could_not_be_installed_is_found_in_output() -> None:
    for output in (PIP, b"/usr/bin/python3: No module named pip\n", b"sh: 1: pip: not found\n"):
        assert says_not_installed(output) and not says_offline(output)
    assert not says_not_installed(b"Successfully installed polars-1.0\n")


@pytest.mark.parametrize(
    ("command", "installs"),
    [
        ([sys.executable, "-m", "pip", "install", "polars"], True),
        (["/usr/bin/pip", "install", "polars"], True),
        ("uv pip install polars", True),
        (["pip", "list"], False),
        (["make", "install"], False),
        (["ls"], False),
    ],
)
def test_a_child_that_was_to_install_is_recognized_by_its_command(command: str | list[str], installs: bool) -> None:
    assert is_install(subprocess.CalledProcessError(1, command)) is installs


def test_a_failed_install_says_how_packages_are_had() -> None:
    source = "import subprocess\nraise subprocess.CalledProcessError(1, ['pip', 'install', 'polars'])"
    error = Agent().run(source).error
    assert error is not None
    message = describe(error, "<execution-1>", source, []).message
    assert message.endswith(f"\n{NOT_INSTALLED}") and 'packages=["NAME"]' in message


ALLOWED = ("pypi.org:443", "*.pythonhosted.org:443")


def test_a_program_that_goes_around_the_proxy_learns_what_leads_out() -> None:
    """Such as one that opens a socket itself, or a library that ignores the environment."""
    source = "import socket\nsocket.create_connection(('pypi.org', 443))"
    error = Agent().run(source).error
    assert error is not None
    message = describe(error, "<execution-1>", source, [[1, 99]], ALLOWED).message
    assert message.endswith(f"\n{note(ALLOWED)}") and NO_NETWORK not in message
    assert "http_proxy" in message and "allowed: pypi.org:443, *.pythonhosted.org:443" in message


def test_a_refusal_of_the_proxy_is_explained_by_the_proxy_alone() -> None:
    source = "raise OSError('Tunnel connection failed: 403 x.org:443 is not allowed for this session')"
    error = Agent().run(source).error
    assert error is not None
    assert describe(error, "<execution-1>", source, [[1, 99]], ALLOWED).message == str(error)


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("Missing optional dependency 'openpyxl'.  Use pip or conda to install openpyxl.", "openpyxl"),
        ("`Import lxml` failed. lxml is required. Use pip or conda to install the lxml package.", "lxml"),
        ("Please install using the command `pip install fastexcel`.", "fastexcel"),
        ("run `python -m pip install --upgrade 'polars[excel,x]'`", "polars[excel,x]"),
        ("Install it: conda install -c conda-forge tables", "tables"),
        ("No module named 'helper'", ""),
        ("cannot import name 'install' from 'pip'", ""),
    ],
)
def test_the_advice_of_a_library_to_install_leads_to_the_packages_of_a_session(text: str, package: str) -> None:
    assert missing_package(ImportError(text)) == package
    assert missing_package(ValueError(text)) == ""
    detail = describe(ImportError(text), "<execution-1>", "", [])
    assert (f'packages=["{package}"]' in detail.message) is bool(package)
    assert (f'packages=["{package}"]' in detail.traceback) is bool(package)
    assert "packages=" not in describe(ImportError(text), "<execution-1>", "", [], network=("pypi.org",)).message
