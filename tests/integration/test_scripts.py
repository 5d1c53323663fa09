"""`executor run FILE ARGS…` is `python FILE ARGS…` in a sandbox: scripts as people write them, run by both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from tests.integration.test_cli_executor import environment, executor, started
from tests.support.fork_server import EXECUTOR, run
from tests.support.rounds import usual

__all__ = ["environment"]

TIMEOUT_S = 60.0


class Script(NamedTuple):
    source: str
    arguments: tuple[str, ...] = ()
    stdin: str = ""
    files: Mapping[str, str] = MappingProxyType({})
    exit_code: int = 0


SCRIPTS = {
    "argparse": Script(
        "import argparse\np = argparse.ArgumentParser(description='Adds.')\np.add_argument('numbers', nargs='+', type=int)\n"
        "p.add_argument('--fast', '-f', action='store_true')\np.add_argument('--image')\na = p.parse_args()\n"
        "print(sum(a.numbers), a.fast, a.image)\n",
        ("1", "2", "--fast", "--image", "data"),
    ),
    "argparse, a mistake": Script(
        "import argparse\np = argparse.ArgumentParser(prog='x')\np.add_argument('n', type=int)\np.parse_args()",
        ("many",),
        exit_code=2,
    ),
    "a file among the arguments": Script(
        "import sys\nwith open(sys.argv[1]) as file: print(len(file.read().split()))\nprint(sys.argv)",
        ("data/in.txt",),
        files={"data/in.txt": "one two three"},
    ),
    "a file in an option": Script(
        "import sys\nprint(open(sys.argv[1].partition('=')[2]).read())", ("--input=in.txt",), files={"in.txt": "text"}
    ),
    "siblings": Script(
        "from pathlib import Path\nimport helper\nfrom pack.part import x\nprint(helper.double(x), helper.__name__)\n"
        "print(Path(__file__).name, Path(helper.__file__).parent == Path(__file__).parent)",
        files={
            "helper.py": "def double(n): return 2 * n",
            "pack/__init__.py": "",
            "pack/part.py": "from . import y\nx = y.y",
            "pack/y.py": "y = 21",
        },
    ),
    "stdin by lines": Script(
        "import sys\nfor n, line in enumerate(sys.stdin, 1): print(n, line.rstrip().upper())", stdin="a\nb\né\n"
    ),
    "input": Script("name = input('Name? ')\nage = int(input())\nprint(f'{name} {age + 1}')", stdin="Ada\n36\n"),
    "stdin that ends": Script("import sys\nprint(repr(sys.stdin.read()))\ninput()", exit_code=1),
    "bytes of stdin": Script("import sys\nprint(sys.stdin.buffer.read().hex())", stdin="abc" * 50_000),
    "csv, json, pathlib": Script(
        "import csv, io, json, os\nfrom pathlib import Path\nrows = list(csv.DictReader(open('in.csv')))\n"
        "Path('out').mkdir()\nPath('out/rows.json').write_text(json.dumps(rows, indent=1))\n"
        "print(sorted(os.listdir('out')), Path('out/rows.json').read_text())",
        ("in.csv",),
        files={"in.csv": "a,b\n1,2\n3,4\n"},
    ),
    "dataclasses": Script(
        "from __future__ import annotations\nfrom dataclasses import dataclass, field, asdict\nimport pickle\n"
        "@dataclass(order=True)\nclass P:\n    x: int\n    tags: list[str] = field(default_factory=list)\n"
        "def main() -> None:\n    print(pickle.loads(pickle.dumps(P(1, ['a']))), asdict(P(2)), P(1) < P(2))\n"
        "if __name__ == '__main__':\n    main()\n"
    ),
    "logging": Script(
        "import logging, sys\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(levelname)s %(name)s %(message)s')\n"
        "logging.getLogger('app').info('begun %d', 1)\nlogging.warning('odd')\nlogging.debug('hidden')\n"
    ),
    "subprocess": Script(
        "import subprocess, sys\nprint(subprocess.run(['echo', 'a b'], capture_output=True, text=True).stdout, flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'print(6 * 7)'], check=True)\n"
        "sys.exit(subprocess.run([sys.executable, 'other.py']).returncode)",
        files={"other.py": "print('other')\nraise SystemExit(4)"},
        exit_code=4,
    ),
    "asyncio": Script(
        "import asyncio\nasync def work(n):\n    await asyncio.sleep(0)\n    return n * n\n"
        "async def main():\n    print(await asyncio.gather(*map(work, range(4))))\n"
        "    print(await asyncio.to_thread(sum, [1, 2]))\nasyncio.run(main())\n"
    ),
    "unittest": Script(
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n"
        "    def test_b(self): self.assertEqual(1, 2)\nif __name__ == '__main__':\n    unittest.main()\n",
        ("-v",),
        exit_code=1,
    ),
    "sqlite": Script(
        "import sqlite3\nwith sqlite3.connect('a.db') as db:\n    db.execute('create table t (x)')\n"
        "    db.executemany('insert into t values (?)', [(n,) for n in range(5)])\n"
        "print(db.execute('select sum(x) from t').fetchone())"
    ),
    "multiprocessing": Script(
        "import multiprocessing\ndef square(n):\n    return n * n\nif __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool:\n        print(pool.map(square, range(5)))\n"
    ),
    "multiprocessing by spawn": Script(
        "import multiprocessing\nfrom helper import square\ndef here(n):\n    return square(n) + 1\n"
        "if __name__ == '__main__':\n    multiprocessing.set_start_method('spawn')\n"
        "    with multiprocessing.Pool(2) as pool:\n        print(pool.map(here, range(3)))\n",
        files={"helper.py": "def square(n):\n    return n * n\n"},
    ),
    "tempfile and a seed": Script(
        "import random, tempfile, os\nrandom.seed(3)\nwith tempfile.TemporaryDirectory() as d:\n"
        "    with open(os.path.join(d, 'x'), 'w') as file: file.write('abc')\n    print(os.path.getsize(file.name))\n"
        "print([random.randint(0, 99) for _ in range(5)], random.sample(range(9), 3))"
    ),
    "threads and atexit": Script(
        "import atexit, threading, time\nfrom concurrent.futures import ThreadPoolExecutor\natexit.register(print, 'bye')\n"
        "pool = ThreadPoolExecutor(2)\nfuture = pool.submit(lambda: time.sleep(0.1) or print('pool'))\nfuture.result()\n"
        "threading.Timer(0.2, lambda: print('thread')).start()\nprint('end')"
    ),
    "a plot": Script(
        "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.savefig('p.png')\n"
        "print(open('p.png', 'rb').read(4), len(plt.get_fignums()))\nplt.close('all')"
    ),
    "exit with a text": Script("import sys\nprint('before')\nsys.exit('no such thing')", exit_code=1),
    "a byte order mark": Script("\ufeffprint('é', __name__)"),
    "many operations": Script("print(sum(n % 7 for n in range(100_000)))"),
}


def by_python(directory: Path, *arguments: str, stdin: bytes) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, cwd=directory, timeout=TIMEOUT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def by_executor(
    environment: dict[str, str], directory: Path, *arguments: str, stdin: bytes
) -> tuple[int, bytes, bytes]:
    done = run([*EXECUTOR, *arguments], input=stdin, cwd=directory, env=environment, timeout=TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def _last_line(err: bytes) -> bytes:
    ours = [line for line in err.splitlines() if not line.startswith(b"[created or changed")]
    return ours[-1] if ours else b""


# Run with --all: each is made of what the others have, too.
SIMILAR = (
    *(
        "argparse, a mistake",
        "a file in an option",
        "csv, json, pathlib",
        "dataclasses",
        "logging",
        "asyncio",
        "unittest",
    ),
    *("sqlite", "multiprocessing", "tempfile and a seed", "many operations"),
)


@pytest.mark.parametrize("name", usual(SCRIPTS, but=SIMILAR))
def test_a_script_does_what_it_does_by_python(environment: dict[str, str], tmp_path: Path, name: str) -> None:
    script = SCRIPTS[name]
    for place in ("here", "there"):
        for path, text in {"script.py": script.source, **script.files}.items():
            (tmp_path / place / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / path).write_text(text, "utf-8")
    stdin = script.stdin.encode()
    expected = by_python(tmp_path / "here", "script.py", *script.arguments, stdin=stdin)
    seen = by_executor(environment, tmp_path / "there", "run", "script.py", *script.arguments, stdin=stdin)
    assert seen[:2] == expected[:2], seen[2].decode()
    assert (seen[0], _last_line(seen[2])) == (script.exit_code, _last_line(expected[2]))


def test_neighbours_that_are_no_modules_stay_behind(environment: dict[str, str], tmp_path: Path) -> None:
    """A lock of Emacs, which is a dangling link, and a directory named like a module ended the command with a traceback."""
    (tmp_path / ".#script.py").symlink_to("user@host.1:2")
    (tmp_path / "dangling.py").symlink_to("nowhere")
    (tmp_path / ".hidden.py").write_text("")
    (tmp_path / "pkg.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    for directory in ("pack", "pack/directory.py", "pack/.checkpoints"):
        (tmp_path / directory).mkdir()
    for name in ("pack/part.py", "pack/.#part.py", "pack/.checkpoints/part.py", "helper.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9")
    (tmp_path / "script.py").write_text(
        "import os, helper, latin, pack.part\n"
        "print(sorted(n for d in ('.', 'pack') for n in os.listdir(d) if n.endswith('.py')), os.listdir('pack'))"
    )
    code, out, err = by_executor(environment, tmp_path, "run", "script.py", stdin=b"")
    assert (code, out) == (0, b"['helper.py', 'latin.py', 'part.py', 'script.py'] ['part.py']\n"), err


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to do without its rights")
@pytest.mark.parametrize(
    ("source", "code", "out", "said"),
    [("print(1)", 0, b"1\n", b""), ("import os, secret", 2, b"", b"executor: secret.py cannot be read: ")],
)
def test_only_a_module_that_is_imported_must_be_readable(
    environment: dict[str, str], tmp_path: Path, source: str, code: int, out: bytes, said: bytes
) -> None:
    (tmp_path / "script.py").write_text(source)
    (tmp_path / "secret.py").write_text("")
    (tmp_path / "secret.py").chmod(0)
    without_rights = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    command = [*without_rights, *EXECUTOR, "run", "script.py"]
    done = run(command, input=b"", cwd=tmp_path, env=environment, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert done.stderr.startswith(said) and done.stderr.count(b"\n") == bool(said)


def test_a_traceback_is_that_of_python(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def invert(n):\n    return 1 / n\n")
    (tmp_path / "script.py").write_text(
        "import helper\ntry:\n    helper.invert(0)\nexcept ZeroDivisionError as error:\n    raise KeyError('a') from error\n"
    )
    _, _, expected = by_python(tmp_path, "script.py", stdin=b"")
    code, out, seen = by_executor(environment, tmp_path, "run", "script.py", stdin=b"")
    assert (code, out) == (1, b"")
    assert seen == expected.replace(os.fsencode(tmp_path), b"/workspace")


@pytest.mark.parametrize(
    ("header", "text"),
    [("# -*- coding: latin-1 -*-\nprint('é')", "latin-1"), ("\ufeffprint('é')", "utf-8"), ("print('é')\r\n", "utf-8")],
)
def test_the_encoding_is_the_files_own(environment: dict[str, str], tmp_path: Path, header: str, text: str) -> None:
    (tmp_path / "script.py").write_bytes(header.encode(text))
    assert by_executor(environment, tmp_path, "run", "script.py", stdin=b"")[:2] == (0, "é\n".encode())


def test_the_cells_of_a_notebook_run_in_order(environment: dict[str, str], tmp_path: Path) -> None:
    bash = ("code", ["%%bash\n", 'echo "it\'s"'])
    first = ("code", ["%matplotlib inline\n", "from beside import TWO as x\n", "x * 3"])
    cells = [("markdown", ["# Title"]), first, bash, ("code", ["print(x)"]), ("code", ["1 / 0"])]
    notebook = {"cells": [{"cell_type": kind, "source": source} for kind, source in cells], "nbformat": 4}
    (tmp_path / "beside.py").write_text("TWO = 2")
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook, indent=1))
    code, out, err = by_executor(environment, tmp_path, "run", "n.ipynb", stdin=b"")
    assert (code, out, b"ZeroDivisionError" in err) == (1, b"6\nit's\n2\n", True)


def test_directories_go_in_by_put(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "script.py").write_text("import os\nprint(os.listdir('data'))")
    assert by_executor(environment, tmp_path, "run", "--put", "data", "script.py", stdin=b"")[:2] == (0, b"['a.txt']\n")


def test_a_script_that_waits_for_input_gets_it_when_it_comes(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ready', flush=True)\nprint(input().upper())")
    with started(environment, "run", str(tmp_path / "script.py")) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("late\n")
        process.stdin.flush()
        assert process.stdout.readline() == "LATE\n"
        assert process.wait(TIMEOUT_S) == 0, "it ends, though its input has not"


def test_what_the_policy_denies_stays_denied(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import json, os, csv\nprint(1)")
    (tmp_path / "plain.py").write_text("import json, sys\nprint(json.dumps(sys.argv))")
    plain = by_executor(environment, tmp_path, "run", "--imports", "json", "plain.py", "--a", stdin=b"")
    assert plain[:2] == (0, b'["plain.py", "--a"]\n')
    assert by_executor(environment, tmp_path, "run", "--imports", "json", "script.py", stdin=b"")[0] == 1
    assert executor(environment, "run", str(tmp_path / "script.py"))[:2] == (0, "1\n")
