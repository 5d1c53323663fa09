"""Wheels that attack the program that unpacks, installs or imports them. Each has a project's name of its own.

What leaves a trace, leaves it at `MARK` in the sandbox's /tmp, or tries to leave it outside.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.package_index.wheels import Entry, make_wheel, many_empty_files

Wheel = tuple[str, bytes]

MARK = "/tmp/hostile-mark"
OUTSIDE = "hostile_was_here.txt"
"""The name of the file that a wheel tries to write outside of where it is unpacked."""


def climbing(depth: int = 3) -> Wheel:
    """Names of entries lead out of the directory."""
    names = [f"{'../' * up}{OUTSIDE}" for up in range(1, depth + 1)]
    names += [f"climbing/{'../' * up}{OUTSIDE}" for up in range(2, depth + 2)]
    return make_wheel("climbing", extra=[Entry(name, b"climbed") for name in names])


def absolute() -> Wheel:
    """Names of entries are absolute."""
    return make_wheel("absolute", extra=[Entry(f"/tmp/{OUTSIDE}", b"absolute"), Entry(f"//tmp/{OUTSIDE}", b"absolute")])


def backslashes() -> Wheel:
    """Names of entries climb with the other separator."""
    return make_wheel(
        "backslashes", extra=[Entry(f"..\\..\\{OUTSIDE}", b"climbed"), Entry(f"C:\\{OUTSIDE}", b"absolute")]
    )


def linking() -> Wheel:
    """A symbolic link to a directory outside, and an entry that would be written through it."""
    extra = [Entry.link("linking/out", "../../../.."), Entry(f"linking/out/{OUTSIDE}", b"through a link")]
    return make_wheel("linking", extra=[*extra, Entry.link("linking/passwd", "/etc/passwd")])


def climbing_data() -> Wheel:
    """The places of its data lead out of the directory."""
    data = "climbing_data-1.0.data"
    names = [f"{data}/data/../../{OUTSIDE}", f"{data}/scripts/../../{OUTSIDE}", f"{data}/purelib/../../../{OUTSIDE}"]
    return make_wheel("climbing_data", extra=[Entry(name, b"#!python\nclimbed") for name in names])


def climbing_record() -> Wheel:
    """RECORD lists files outside, which an installer must neither write nor remove."""
    record = f"../../../{OUTSIDE},,\n/etc/passwd,,\nclimbing_record.py,,\nclimbing_record-1.0.dist-info/RECORD,,\n"
    return make_wheel("climbing_record", record=record)


def climbing_script(victim: str) -> Wheel:
    """The name of its console script leads to another package's file."""
    scripts = {f"../{victim}/__init__.py": "climbing_script:main", f"../../../{OUTSIDE}": "climbing_script:main"}
    return make_wheel("climbing_script", scripts=scripts)


def overwriting(victim: str) -> Wheel:
    """It has files of another package, in its library, its data and as a script's name."""
    data = "overwriting-1.0.data"
    return make_wheel(
        "overwriting",
        files={f"{victim}/__init__.py": "VERSION = 'overwritten'\n", "overwriting.py": ""},
        extra=[
            Entry(f"{data}/purelib/{victim}/data.txt", b"overwritten"),
            Entry(f"{data}/platlib/{victim}/more.txt", b"overwritten"),
            Entry(f"{data}/data/{victim}/other.txt", b"overwritten"),
        ],
        scripts={f"{victim}-tool": "overwriting:main"},
    )


def bomb(name: str, size_bytes: int, files: int) -> Wheel:
    """A small archive of large files."""
    return make_wheel(name, extra=[Entry(f"bomb_data/{n}", bytes(size_bytes), recorded=False) for n in range(files)])


def crowd(count: int = 1_000_000) -> Wheel:
    """So many files."""
    name, content = make_wheel("crowd")
    return name, many_empty_files(content, count, "crowd_data")


def lying_archive() -> Wheel:
    """Its central directory and its local headers name different files: readers of each see different wheels."""
    name, content = make_wheel(
        "lying_archive", files={"lying_archive.py": "SEEN = 1\n", "aaaa_honest.py": "HONEST = 1\n"}
    )
    first = content.index(b"aaaa_honest.py")
    return name, content[:first] + b"zzzz_hidden.py" + content[first + len(b"zzzz_hidden.py") :]


def deep(levels: int = 200) -> Wheel:
    """A file below very many directories."""
    return make_wheel("deep", extra=[Entry(f"{'d/' * levels}file", b"deep")])


def odd_names() -> Wheel:
    """Names of entries that are hard to print, to compare or to store."""
    names = [
        "odd/line\nbreak.py",
        "odd/esc\x1b[31m.py",
        "odd/" + "n" * 300,
        "odd/ .py",
        "odd/CON.py",
        "odd/\u00e9.py",
        "odd/e\u0301.py",
    ]
    return make_wheel("odd_names", extra=[Entry(name, b"odd") for name in names])


def setuid() -> Wheel:
    """Files with every bit of a mode."""
    return make_wheel("setuid", extra=[Entry("setuid_data/tool", b"#!/bin/sh\n", 0o107777)])


def starting(code: str = f"open({MARK!r}, 'a').write('pth ')") -> Wheel:
    """A `.pth` file whose code runs at each start of an interpreter."""
    return make_wheel("starting", extra=[Entry("starting.pth", f"import os; {code}\n".encode())])


def importing(name: str, code: str) -> Wheel:
    """A module whose import runs this code."""
    return make_wheel(name, files={f"{name}/__init__.py": code})


_TRY_TO_WRITE = """
import os
done = []
def try_to(what, action):
    try:
        action()
    except OSError:
        return
    done.append(what)
here = os.path.dirname(os.path.abspath(__file__))
site = os.path.dirname(here)
for place in (site, here, "/run/executor/environment", "/run/executor/work", "/run/executor/programs", "/run/executor", "/"):
    try_to(f"make a file in {place}", lambda: open(place + "/hostile_was_here.txt", "w").close())
for root, _, names in os.walk(site):
    for name in names:
        path = os.path.join(root, name)
        try_to(f"write to {path}", lambda: os.close(os.open(path, os.O_WRONLY)))
        try_to(f"truncate {path}", lambda: os.truncate(path, 0))
        try_to(f"change the mode of {path}", lambda: os.chmod(path, 0o777))
        try_to(f"remove {path}", lambda: os.unlink(path))
    try_to(f"rename {root}", lambda: os.rename(root, root + "-moved"))
if done:
    raise SystemExit("; ".join(done)[:2000])
"""

IMPORTS: dict[str, str] = {
    "import_writes": _TRY_TO_WRITE,
    "import_kills": "import os, signal\nfor pid in (os.getppid(), 1, -1):\n    try:\n        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\n",
    "import_forks": "import os\nfor _ in range(200):\n    try:\n        os.fork()\n    except OSError:\n        pass\nimport time\ntime.sleep(1e6)\n",
    "import_prints": "import os\nwhile True:\n    os.write(1, b'x' * 65536)\n",
    "import_hangs": "import time\ntime.sleep(1e6)\n",
    "import_exits": "import os\nos._exit(3)\n",
    "import_raises": "raise RuntimeError('not today')\n",
    "import_takes_memory": "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))\n",
    "import_fills_disk": "with open('/tmp/full', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))\n",
}
"""Code by the name of the module whose import runs it. None of it may cost more than its own bytecode."""

ARCHIVES: dict[str, Callable[[], Wheel]] = {
    "climbing": climbing,
    "absolute": absolute,
    "backslashes": backslashes,
    "linking": linking,
    "climbing_data": climbing_data,
    "climbing_record": climbing_record,
    "lying_archive": lying_archive,
    "deep": deep,
    "odd_names": odd_names,
    "setuid": setuid,
}
"""Archives by the name of their project. Each is refused, or what is installed of it is harmless."""
