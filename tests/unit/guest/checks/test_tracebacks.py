"""The traceback of a program that failed: its own lines and where it failed, and no walk through libraries."""

from __future__ import annotations

import linecache
import socket
import sys
import threading
from pathlib import Path

import pytest

from executor_server.guest.checks.failures import describe
from tests.support.agent_program import Agent

FILENAME = "<execution-1>"


def traceback_of(source: str, own: str = "/nowhere/") -> str:
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    error = Agent().run(source).error
    assert error is not None
    detail = describe(error, FILENAME, source, [[1, 99]], owns=lambda path: path.startswith(own))
    assert detail.message.splitlines()[-1] in detail.traceback
    return detail.traceback


@pytest.mark.parametrize(
    "source",
    [
        "import pandas as pd\ndf = pd.DataFrame({'a': [1]})\nprint(df['b'])",
        "import pandas as pd\npd.read_csv('missing.csv')",
        "import pandas as pd\npd.DataFrame({'a': ['x']}).groupby('a').apply(lambda group: group['b'])",
        "import json\njson.loads('{')",
    ],
)
def test_the_frames_of_libraries_are_folded_but_for_the_innermost(source: str) -> None:
    """A missing key of pandas took 25 lines of a model's context."""
    shown = traceback_of(source)
    assert len(shown.splitlines()) <= 14
    assert "frames of libraries not shown: " in shown
    assert source.splitlines()[-1] in shown
    assert shown.count("site-packages") + shown.count("lib/python") <= 2


def test_the_programs_own_frames_stay_wherever_they_are() -> None:
    shown = traceback_of("import functools\ndef add(a, b):\n    return a + b\nfunctools.reduce(add, [1, 'x'])")
    assert "functools.reduce(add, [1, 'x'])" in shown and "return a + b" in shown
    assert "not shown" not in shown


def test_the_frames_of_a_module_of_the_programs_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_helper.py").write_text("import json\ndef load(text):\n    return json.loads(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_helper", raising=False)
    shown = traceback_of("import own_helper\nown_helper.load('{')", own=str(tmp_path))
    assert "return json.loads(text)" in shown and "own_helper.load('{')" in shown


def test_an_exception_of_a_library_that_says_something_new_stays() -> None:
    source = (
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as e:\n    error = e\n"
        "class Odd(dict):\n    def __missing__(self, key):\n        raise KeyError(key) from error\nOdd()['a']"
    )
    shown = traceback_of(source)
    assert "Expecting property name" in shown and "KeyError: 'a'" in shown


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with 3.11")
def test_the_exceptions_of_a_group_are_folded_too() -> None:
    source = (
        "import json\nerrors = []\nfor text in '{[':\n    try:\n        json.loads(text)\n    except ValueError as e:\n"
        "        errors.append(e)\nraise ExceptionGroup('both', errors)"
    )
    shown = traceback_of(source)
    assert shown.count("frames of libraries not shown: ") == 2


def test_a_recursion_without_end_is_short() -> None:
    shown = traceback_of("def f():\n    f()\nf()")
    assert len(shown.splitlines()) < 15


@pytest.mark.parametrize(
    "call",
    [
        "import requests\nrequests.get('https://refused.example', timeout=5)",
        "import httpx\nhttpx.get('https://refused.example')",
        "import urllib.request\nurllib.request.build_opener().open('https://refused.example')",
    ],
)
def test_a_refused_host_costs_a_few_lines(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's refusal came as five chained exceptions in 40 lines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse_one, args=(server,))
        thread.start()
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        shown = traceback_of(call)
        thread.join()
    assert "refused.example" in shown and "403" in shown
    assert len(shown.splitlines()) <= 14


def refuse_one(server: socket.socket) -> None:
    server.settimeout(10)
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 403 the policy does not allow refused.example\r\nContent-Length: 0\r\n\r\n")
