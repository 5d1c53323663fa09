"""The rules of the language in a real sandbox: refused however they are broken, not for libraries, changed at any time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_server.sessions import Session
from tests.contract.harness import Harness, follow, load_library, pieces
from tests.contract.marks import promise
from tests.support.language_corpus import BASE
from tests.support.polling import eventually_async

pytestmark = promise("rules-language")

STRICT = 'language.preset = "strict"'
LIBRARY = """\
import ctypes, os, subprocess, tempfile, threading
ctypes.CDLL(None)
AT_IMPORT = subprocess.run(["/bin/true"]).returncode
def load(): return ctypes.CDLL(None) is not None
def start(): return subprocess.run(["/bin/true"]).returncode
def in_thread():
    thread = threading.Thread(target=os.system, args=("true",))
    thread.start()
    thread.join()
def scratch():
    with tempfile.TemporaryFile("w") as file: return file.write("abc")
def save(path):
    with open(path, "w") as file: return file.write("abc")
def read(path):
    with open(path) as file: return file.read()
"""


async def _session(harness: Harness, profile: str = "", imports: tuple[str, ...] = ("*",)) -> Session:
    session = await harness.session_under(profile, imports=imports)
    await session.put_file("there.txt", 5, pieces(b"there"))
    await load_library(session, "library", LIBRARY)
    return session


REFUSED = {
    "file_writing": [
        ("x = 1\nopen('a.txt', 'w')", 2),
        ("open('/tmp/a.txt', 'a')", 1),
        ("open('there.txt', 'r+')", 1),
        ("import io\nio.open('a.txt', 'x')", 2),
        ("import os\nos.open('/tmp/a', os.O_CREAT | os.O_WRONLY)", 2),
        ("import pathlib\npathlib.Path('/tmp/a.txt').write_text('a')", 2),
        ("import tempfile\ntempfile.NamedTemporaryFile()", 2),
        ("import shutil\nshutil.copy('there.txt', '/tmp/a.txt')", 2),
        ("import gzip\ngzip.open('/tmp/a.gz', 'wb')", 2),
        ("f = open\nlist(map(f, ['a.txt'], ['w']))", 2),
        ("import library\nlibrary.save('a.txt')", 2),
        ("import library\nlibrary.save('/workspace/../workspace/a.txt')", 2),
        ("try:\n    open('a.txt', 'w')\nexcept BaseException:\n    pass", 2),
        ("import os, library\nos.chdir('/')\nlibrary.save('workspace/a.txt')", 3),
    ],
    "open": [
        ("open('there.txt')", 1),
        ("import io\nio.open('there.txt')", 2),
        ("import builtins\nbuiltins.open('there.txt')", 2),
    ],
    "dangerous_functions": [
        ("import os\ngetattr(os, 'sys' + 'tem')('true')", 2),
        ("f = __import__('posix').__dict__['system']\nf('true')", 2),
        ("import os\nvars(os)['fork']()", 2),
        ("import os\nos.__dict__['posix_spawn']('/bin/true', ['true'], {})", 2),
        ("import multiprocessing as m\nm.Process(target=print).start()", 2),
        ("import library\nlibrary.start()", 2),
        ("import library\nlibrary.in_thread()", 0),
        ("import ctypes\nctypes.CDLL(None)", 2),
        ("import pty\npty.__dict__['spawn'](['/bin/true'])", 2),
    ],
}
"""Programs that each do what the rule refuses, and the line of each at which it is refused."""


@pytest.mark.parametrize("rule", REFUSED)
async def test_refused_however_it_is_reached(harness: Harness, rule: str) -> None:
    session = await _session(harness, f"language.{rule} = false")
    await harness.run(session, "kept = 1")
    for source, line in REFUSED[rule]:
        run = await harness.run(session, source)
        assert run.outcome == "policy_denied", (source, run.ended)
        assert run.ended.error is not None
        assert (run.ended.error.type, run.ended.error.line, run.state) == ("PolicyDenied", line, "kept"), source
        assert f"(language.{rule})" in run.message
        assert (await harness.run(session, "kept")).output == 1


ALLOWED = [
    ("import library\nlibrary.AT_IMPORT", 0),
    ("import library\nlibrary.load()", True),
    ("import library\nlibrary.scratch()", 3),
    ("import library\nlibrary.save('/tmp/a.txt')", 3),
    ("import library\nlibrary.read('there.txt')", "there"),
    ("import pathlib\npathlib.Path('there.txt').read_text()", "there"),
    ("import numpy\nint(numpy.arange(9).sum())", 36),
    ("import numpy.ctypeslib\nnumpy.ctypeslib.as_array([1]).shape", (1,)),
    ("import uuid\nlen(str(uuid.uuid4()))", 36),
    ("import datetime\ndatetime.datetime.strptime('2020', '%Y').year", 2020),
    ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\nP(1).x", 1),
    ("import contextlib, os\nwith contextlib.redirect_stdout(None):\n    print(1)\n2", 2),
]
"""Programs that have a library do such things, and their values."""


async def test_libraries_may_do_for_themselves_what_the_program_may_not(harness: Harness) -> None:
    session = await _session(harness, STRICT)
    for source, output in ALLOWED:
        run = await harness.run(session, source)
        assert run.outcome == "succeeded", (source, run.ended)
        assert run.output == output, source


async def test_tools_and_display_are_no_builtins_that_a_rule_means(harness: Harness) -> None:
    session = await _session(harness, STRICT, imports=BASE)
    run = await harness.run_with_tools(session, "open('x') + eval(2)", {"open": lambda x: x, "eval": lambda n: str(n)})
    assert run.output == "x2"
    run = await harness.run_with_tools(session, "display\nopen('x')", {})
    assert (run.outcome, "language.open" in run.message) == ("policy_denied", True)


NOTHING_DYNAMIC = "language.dynamic_code = false"


async def test_other_rules_hold_from_the_next_execution_on(harness: Harness) -> None:
    session = await _session(harness)
    await harness.run(
        session, "import json\ndef f(name):\n    return __import__(name).__name__\ndef g():\n    return eval('3')"
    )
    await harness.change_policy(session, f'imports = {{ allowed = ["math"], denied = ["os"] }}\n{NOTHING_DYNAMIC}')
    assert (await harness.run(session, "import json")).outcome == "import_denied"
    assert (await harness.run(session, "f('json')")).outcome == "import_denied"
    assert (await harness.run(session, "f('math')")).output == "math"
    assert (await harness.run(session, "g()")).outcome == "policy_denied"


async def test_rules_that_are_wider_again_hold_from_the_next_execution_on(harness: Harness) -> None:
    """No policy widens a session's rules; AuthorizeImports does, as far as the policy allows."""
    session = await _session(harness, NOTHING_DYNAMIC, imports=("math",))
    await harness.run(session, "def g():\n    return eval('3')")
    assert (await harness.run(session, "g()")).outcome == "policy_denied"
    await session.requests.restrict(
        replace(session.spec, authorized_imports=("*",), denied_imports=("os",), refused_language=()), must_go=False
    )
    assert (await harness.run(session, "import json\ng(), json.dumps(1)")).output == (3, "1")
    assert (await harness.run(session, "import os")).outcome == "import_denied"


async def test_a_running_execution_keeps_its_rules(harness: Harness) -> None:
    session = await _session(harness)
    running = await harness.begin(
        session, "import time, os\nwhile not os.path.exists('go'): time.sleep(0.01)\nimport json\njson.dumps(1)"
    )
    assert await eventually_async(lambda: session.state == "busy")
    await harness.change_policy(session, 'imports.allowed = ["math"]')
    await session.put_file("go", 0, pieces(b""))
    assert (await follow(running)).output == "1"
    assert (await harness.run(session, "import json")).outcome == "import_denied"


async def test_an_interpreter_that_takes_another_s_place_has_the_latest_rules(harness: Harness) -> None:
    session = await _session(harness)
    await harness.change_policy(session, f'imports.allowed = ["os"]\n{NOTHING_DYNAMIC}')
    assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
    assert (await harness.run(session, "__import__('json')")).outcome == "import_denied"
    assert (await harness.run(session, "eval('1')")).outcome == "policy_denied"


async def test_a_program_cannot_leave_other_builtins_to_the_next(harness: Harness) -> None:
    session = await _session(harness, NOTHING_DYNAMIC)
    await harness.run(session, "import os\n__builtins__ = os.__builtins__")
    assert (await harness.run(session, "eval('1')")).outcome == "policy_denied"
    assert (await harness.run(session, "print('fine')")).stdout == "fine\n"


async def test_results_say_what_their_sources_import(harness: Harness) -> None:
    session = await _session(harness, imports=("math", "os"))
    run = await harness.run(session, "import os, math\nfrom math import pi\nif 0:\n    import os.path as p")
    assert (run.outcome, run.ended.imports) == ("import_denied", ("math", "os", "os.path"))
    assert (await harness.run(session, "import math")).ended.imports == ("math",)
    assert (await harness.run(session, "1")).ended.imports == ()
    assert (await harness.run(session, "def")).ended.imports == ()
