"""Programs that import, each with its exact verdict: the same in the source and at run time, on every CPython.

All run in one session, one after the other, under IMPORTS and DENIED, with MODULES in the workspace. So a refusal that
harms more than its own execution shows in the programs that follow.
"""

from __future__ import annotations

from typing import NamedTuple

AUTHORIZED = (
    *("collections", "email", "importlib.*", "json", "math", "os", "os.path", "pkgutil", "random", "re", "runpy"),
    *("concurrent.futures", "builtins", "threading", "functools", "pydoc", "helper", "pack.*", "xml.*", "sys"),
)
DENIED = ("os.path", "xml.dom.*", "pack.secret")

MODULES = {
    # The program's own, held to the rules as the program is.
    "helper.py": (
        "def by_name(name):\n    import importlib\n    return importlib.import_module(name).__name__\n"
        "def by_function(name):\n    return __import__(name).__name__\n"
        "def by_text(name):\n    exec('import ' + name)\n    return name\n"
        "def call(function, *args):\n    return function(*args)\n"
    ),
    "pack/__init__.py": "from pack import plain\n",
    "pack/secret.py": "value = 'secret'\n",
    "pack/plain.py": "value = 'plain'\n",
    "pack/all.py": "from . import plain, secret\n",
    "pack/near.py": "from .plain import value\nfrom . import plain\nfrom .. import pack\n",
    "pack/beside.py": "from .plain import value\nfrom . import plain\n",
    "alien.py": "import socket\nvalue = 'alien'\n",
    "unnamed.py": "import math\nvalue = math.floor(2.5)\n",
    "spaces/part.py": "value = 'part'\n",
    "wide.py": "__path__ = ['/']\ntry:\n    __import__('so' + 'cket')\nexcept BaseException:\n    pass\n",
    "base64.py": "value = 'not the library'\n",  # Python's own come first
    "compiled.pyc": "no code",
    "compiled_too.so": "no code",
}


class Program(NamedTuple):
    """`verdict` is the refused module or OK, `line` its line, `value` the output where that matters."""

    source: str
    verdict: str
    line: int = 0
    value: object = None


OK = ""


def _wide(text: str) -> str:
    """Returns the letters in their full-width forms, which Python reads as the plain ones in names."""
    return "".join(chr(ord(letter) + 0xFEE0) for letter in text)


PROGRAMS: dict[str, Program] = {
    # -- the statements
    "import": Program("import math\nmath.floor(2.5)", OK, value=2),
    "import of what is not authorized": Program("import socket", "socket", 1),
    "import of several": Program("import math, json, socket", "socket", 1),
    "the first line that is refused": Program("import math\n\nimport wave\nimport socket", "wave", 3),
    "import as": Program("import socket as s", "socket", 1),
    "import under an authorized name": Program("import socket as math", "socket", 1),
    "from": Program("from math import floor\nfloor(2.5)", OK, value=2),
    "from what is not authorized": Program("from socket import socket", "socket", 1),
    "from as": Program("from socket import socket as math", "socket", 1),
    "star": Program("from math import *\nfloor(2.5)", OK, value=2),
    "star from what is not authorized": Program("from socket import *", "socket", 1),
    "future": Program("from __future__ import annotations\n1", OK, value=1),
    "relative": Program("from . import x", ".", 1),
    "relative name": Program("from .math import floor", ".math", 1),
    "relative to a parent": Program("from ..json import loads", "..json", 1),
    "a module that does not exist": Program("import helper_that_is_not_there", "helper_that_is_not_there", 1),
    # -- names compared part by part
    "a name that begins alike": Program("import reprlib", "reprlib", 1),
    "a longer name": Program("import mathematics", "mathematics", 1),
    "another case": Program("import Math", "Math", 1),
    "private C module behind a public one": Program("import _socket", "_socket", 1),
    "another spelling that Python takes for the same": Program(f"import {_wide('socket')}", "socket", 1),
    "another spelling of what is authorized": Program(f"import {_wide('math')}\nmath.floor(2.5)", OK, value=2),
    "a look-alike letter": Program("import m\u0430th", "m\u0430th", 1),
    "a very long name": Program(f"import {'a' * 100_000}", "a" * 100_000, 1),
    "a very deep name": Program(f"import {'.'.join('a' * 5_000)}", ".".join("a" * 5_000), 1),
    "ten thousand imports": Program("import math\n" * 10_000 + "math.floor(1.5)", OK, value=1),
    "ten thousand imports, one refused": Program("import math\n" * 9_999 + "import wave", "wave", 10_000),
    # -- modules below modules
    "below what is authorized alone": Program("import json.decoder", "json.decoder", 1),
    "from below what is authorized alone": Program("from json.decoder import JSONDecoder", "json.decoder", 1),
    "a module as a member": Program("from json import decoder\ndecoder.__name__", OK, value="json.decoder"),
    "below a star pattern": Program("import xml.sax\nxml.sax.__name__", OK, value="xml.sax"),
    "parent of an authorized one": Program("import concurrent\nconcurrent.__name__", OK, value="concurrent"),
    "authorized below": Program("import concurrent.futures as f\nf.__name__", OK, value="concurrent.futures"),
    "below an authorized one of that depth": Program(
        "import concurrent.futures.thread", "concurrent.futures.thread", 1
    ),
    "attribute that somebody else imported": Program("import json\njson.decoder.__name__", OK, value="json.decoder"),
    # -- denied, though a pattern authorizes it
    "denied": Program("import os.path", "os.path", 1),
    "not denied above": Program("import os\nos.sep", OK, value="/"),
    "denied as": Program("import os.path as p", "os.path", 1),
    "denied from": Program("from os.path import join", "os.path", 1),
    "denied as a member": Program("from os import path", "os.path", 1),
    "denied as a member, under another name": Program("from os import sep, path as p", "os.path", 1),
    "denied among all members": Program("from os import *", "os.path", 1),
    "denied with all below": Program("import xml.dom.minidom", "xml.dom.minidom", 1),
    "denied by a star pattern": Program("import xml.dom", "xml.dom", 1),
    "denied as a member by a star pattern": Program("from xml import dom", "xml.dom", 1),
    "denied in a package that imports it": Program("x = 1\nimport pack.all", "pack.secret", 2),
    "denied in a package": Program("from pack import secret", "pack.secret", 1),
    # -- where an import may stand
    "in a function": Program("def f():\n    import socket\n", "socket", 2),
    "in a class": Program("class C:\n    import socket\n", "socket", 2),
    "in a method": Program("class C:\n    def f(self):\n        from socket import socket\n", "socket", 3),
    "in a branch that is never taken": Program("if False:\n    import socket\n1", "socket", 2),
    "after a return": Program("def f():\n    return 1\n    import socket\nf()", "socket", 3),
    "in a loop that never runs": Program("for i in ():\n    import socket\n", "socket", 2),
    "in try with a fallback": Program("try:\n    import socket\nexcept ImportError:\n    socket = None\n", "socket", 2),
    "in a handler": Program("try:\n    1\nexcept ValueError:\n    import socket\n", "socket", 4),
    "in finally": Program("try:\n    1\nfinally:\n    import socket\n", "socket", 4),
    "in with": Program("import threading\nwith threading.Lock():\n    import socket\n", "socket", 3),
    "on one line": Program("x = 1; import socket", "socket", 1),
    "in an asynchronous function": Program("async def f():\n    import socket\n", "socket", 2),
    "over several lines": Program(
        "from math import (\n    floor,\n)\nfrom socket import (\n    socket,\n)", "socket", 4
    ),
    "for type checkers": Program("TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import socket\n", "socket", 3),
    # -- by name
    "__import__": Program("__import__('math').floor(2.5)", OK, value=2),
    "__import__ of what is not authorized": Program("x = 1\n__import__('socket')", "socket", 2),
    "__import__ by keyword": Program("__import__(name='socket')", "socket", 1),
    "__import__ with members": Program("__import__('os', fromlist=['path'])", "os.path", 1),
    "__import__ as C code calls it": Program("__import__('socket', globals(), globals(), [], 0)", "socket", 1),
    "__import__ under another name": Program("f = __import__\nf('socket', globals(), globals(), [])", "socket", 2),
    "__import__ of a relative name": Program("__import__('x', {'__package__': 'json'}, None, ('y',), 1)", "json.x", 1),
    "__import__ in a lambda": Program("(lambda: __import__('socket'))()", "socket", 1),
    "__import__ in a comprehension": Program("[__import__(n) for n in ('math', 'socket')]", "socket", 1),
    "__import__ in map": Program("list(map(__import__, ['math', 'socket']))", "socket", 1),
    "__import__ in a default": Program("def f(s=__import__('socket')): pass", "socket", 1),
    "__import__ as a decorator": Program("@(lambda f: __import__('socket'))\ndef f(): pass", "socket", 1),
    "__import__ in a class body": Program("class C:\n    s = __import__('socket')", "socket", 2),
    "__import__ as a sort key": Program(
        "sorted(['math', 'socket'], key=lambda n: __import__(n).__name__)", "socket", 1
    ),
    "__import__ in an f-string": Program("f'{__import__(\"socket\")}'", "socket", 1),
    "__import__ through partial": Program("import functools\nfunctools.partial(__import__, 'socket')()", "socket", 2),
    "__import__ called by a library": Program("import helper\nhelper.call(__import__, 'socket')", "socket", 2),
    "__import__ in a thread": Program(
        "import threading\nt = threading.Thread(target=__import__, args=('socket',))\nt.start()\nt.join()", "socket", 0
    ),
    "__import__ with a text that lies": Program(
        "class S(str):\n    def split(self, *a):\n        return ['math']\n    def __str__(self):\n        return 'math'\n"
        "__import__(S('socket'))",
        "socket",
        6,
    ),
    "__import__ that is handled": Program(
        "try:\n    __import__('socket')\nexcept ImportError:\n    pass\n", "socket", 2
    ),
    "__import__ that is swallowed": Program("try:\n    __import__('socket')\nexcept:\n    pass\n1", "socket", 2),
    "__import__ that a library swallows": Program(
        "import concurrent.futures as f\nwith f.ThreadPoolExecutor(1) as p:\n    p.submit(__import__, 'socket').exception()\n",
        "socket",
        0,
    ),
    "a name that is not normalised": Program(f"__import__('{_wide('socket')}')", _wide("socket"), 1),
    "builtins": Program("import builtins\nbuiltins.__import__('socket')", "socket", 2),
    "builtins as C code calls it": Program("import builtins as b\nb.__import__('socket', {}, {}, [])", "socket", 2),
    "builtins by name": Program("__import__('builtins').__import__('socket')", "socket", 1),
    "getattr of builtins": Program("import builtins\ngetattr(builtins, '__imp' + 'ort__')('socket')", "socket", 2),
    # -- importlib and similar modules
    "import_module": Program("import importlib\nimportlib.import_module('math').floor(2.5)", OK, value=2),
    "import_module of what is not authorized": Program("import importlib as i\ni.import_module('socket')", "socket", 2),
    "import_module by member": Program("from importlib import import_module as f\nf('socket')", "socket", 2),
    "import_module by keyword": Program("import importlib\nimportlib.import_module(name='socket')", "socket", 2),
    "import_module of a relative name": Program(
        "import importlib\nimportlib.import_module('.handlers', 'logging')", "logging.handlers", 2
    ),
    "import_module below": Program("import importlib\nimportlib.import_module('json.decoder')", "json.decoder", 2),
    "import_module in map": Program("import importlib\nlist(map(importlib.import_module, ['socket']))", "socket", 2),
    "import_module of a denied one": Program("import importlib\nimportlib.import_module('os.path')", "os.path", 2),
    "importlib.__import__": Program("import importlib\nimportlib.__import__('socket')", "socket", 2),
    "reload": Program("import importlib, json\nimportlib.reload(json).__name__", OK, value="json"),
    "reload of what is not authorized": Program(
        "import importlib, json\nimportlib.reload(json.decoder)", "json.decoder", 2
    ),
    "find_spec": Program("import importlib.util\nimportlib.util.find_spec('math').name", OK, value="math"),
    "find_spec of what is not authorized": Program("import importlib.util as u\nu.find_spec('socket')", "socket", 2),
    "a spec": Program(
        "import importlib.util as u\nfrom importlib.machinery import ModuleSpec, BuiltinImporter\n"
        "u.module_from_spec(ModuleSpec('_socket', BuiltinImporter))",
        "_socket",
        3,
    ),
    "a loader": Program(
        "from importlib.machinery import SourceFileLoader\nSourceFileLoader('alien', '/workspace/alien.py').load_module()",
        "socket",
        2,
    ),
    "the builtin importer": Program(
        "from importlib.machinery import BuiltinImporter\nBuiltinImporter.load_module('_io')", "_io", 2
    ),
    "run_module": Program("import runpy\nrunpy.run_module('alien')", "socket", 2),
    "run_path": Program("import runpy\nrunpy.run_path('/workspace/alien.py')", "socket", 2),
    "resolve_name": Program("import pkgutil\npkgutil.resolve_name('math:floor')(2.5)", OK, value=2),
    "resolve_name of what is not authorized": Program(
        "import pkgutil\npkgutil.resolve_name('socket:socket')", "socket", 2
    ),
    "resolve_name by dots": Program("import pkgutil\npkgutil.resolve_name('socket.socket')", "socket", 2),
    "locate": Program("import pydoc\npydoc.locate('socket.socket')", "socket", 2),
    # -- code as text
    "exec": Program("exec('import math; x = math.floor(2.5)')\nx", OK, value=2),
    "exec of what is not authorized": Program("x = 1\nexec('\\n\\nimport socket')", "socket", 2),
    "exec in a namespace": Program("exec('import socket', {})", "socket", 1),
    "exec with other builtins": Program("import json\nexec('import socket', {'__builtins__': {}})", "socket", 2),
    "exec of bytes": Program("exec(b'import socket')", "socket", 1),
    "exec in exec": Program("exec(\"exec('import socket')\")", "socket", 1),
    "eval": Program("eval('__import__(\"socket\")')", "socket", 1),
    "eval with other builtins": Program("eval('__import__(\"socket\")', {'__builtins__': {}})", "socket", 1),
    "compile": Program("c = compile('import ' + 'socket', 'f', 'exec')", "socket", 1),
    "compile of a tree": Program("import json\nx = 'import socket'\nexec(compile(x, 'f', 'single'))", "socket", 3),
    "a function made by exec": Program(
        "ns = {}\nexec('def f(n): return __import__(n)', ns)\nns['f']('socket')", "socket", 3
    ),
    # -- over executions
    "a function is kept": Program(
        "def later(name):\n    return __import__(name)\nlater('math').floor(2.5)", OK, value=2
    ),
    "a function of an earlier execution": Program("x = 1\nlater('socket')", "socket", 2),
    "variables are kept": Program("later('math').floor(3.5)", OK, value=3),
    # -- modules of the program's own
    "its own": Program("import unnamed\nunnamed.value", OK, value=2),
    "from its own": Program("from unnamed import value\nvalue", OK, value=2),
    "its own, by name": Program("import importlib\nimportlib.import_module('unnamed').value", OK, value=2),
    "its own, in a package": Program("import pack.beside\npack.beside.value", OK, value="plain"),
    "its own, beyond its package": Program(
        "try:\n    import pack.near\nexcept ImportError:\n    x = 2\nx", OK, value=2
    ),
    "its own, in a directory": Program("import spaces.part\nspaces.part.value", OK, value="part"),
    "its own, from a directory": Program("from spaces import part\npart.value", OK, value="part"),
    "its own, run": Program("import runpy\nrunpy.run_module('unnamed')['value']", OK, value=2),
    "its own, under another name": Program(
        "import importlib.util as u\nspec = u.spec_from_file_location('other', '/workspace/unnamed.py')\n"
        "module = u.module_from_spec(spec)\nspec.loader.exec_module(module)\nmodule.value",
        OK,
        value=2,
    ),
    "its own, written by the same program": Program(
        "import os\nfd = os.open('fresh.py', os.O_CREAT | os.O_WRONLY)\nos.write(fd, b'value = 1')\nos.close(fd)\n"
        "import fresh\nfresh.value",
        OK,
        value=1,
    ),
    "its own, changed within a second": Program(
        "import importlib\nfd = os.open('fresh.py', os.O_WRONLY)\nos.write(fd, b'value = 2')\nos.close(fd)\n"
        "importlib.reload(fresh).value",
        OK,
        value=2,
    ),
    "its own that is not authorized to import": Program("x = 1\nimport alien", "socket", 2),
    "its own that imports by name": Program("import helper\nhelper.by_name('wave')", "wave", 2),
    "its own that calls __import__": Program("import helper\nhelper.by_function('wave')", "wave", 2),
    "its own that runs text": Program("import helper\nhelper.by_text('wave')", "wave", 2),
    "its own that swallows a refusal": Program("x = 1\nimport wide", "socket", 2),
    "a library's file in the name of its own": Program(
        "import importlib.util as u, os\nu.spec_from_file_location('helper', os.__file__.replace('os.py', 'wave.py'))",
        "wave",
        2,
    ),
    "a library's file in its own package": Program(
        "import pack, os\npack.__path__.append(os.__file__[:-6])\nimport pack.sched", "time", 3
    ),
    "a link to a library": Program(
        "import os\nos.symlink(os.__file__.replace('os.py', 'sched.py'), 'link.py')\nimport link", "time", 3
    ),
    "a file in the name of a library": Program("import base64", "base64", 1),
    "a file ahead of a library": Program(
        "import sys, os\nfd = os.open('/tmp/sndhdr.py', os.O_CREAT | os.O_WRONLY)\nos.write(fd, b'import wave')\n"
        "os.close(fd)\nsys.path.insert(0, '/tmp')\nimport sndhdr",
        "wave",
        6,
    ),
    "bytecode without a source": Program("import compiled", "compiled", 1),
    "a shared library": Program("import compiled_too", "compiled_too", 1),
    # -- libraries
    "a library by name": Program("import pydoc\npydoc.importlib.__name__", OK, value="importlib"),
    "a library lazily, in the standard library": Program(
        "from email import message_from_string\nmessage_from_string('a: b')['a']", OK, value="b"
    ),
    "a library in C": Program("import re, random\nrandom.Random(1).choice('a')", OK, value="a"),
    "what sys.modules holds": Program("import pydoc, sys\nsys.modules['inspect'].__name__", OK, value="inspect"),
}
