"""Programs that reach for modules that are not authorized, and some that only look so: same verdicts on each CPython.

All run under the preset `guarded`, those with the same imports one after the other in one session, with the base modules
of smolagents and these imports authorized; `helper` is a library that has loaded the modules in question. A `Foreign` program
is refused. SNIPPETS are of the kinds that smolagents' local executor refuses.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.support.language_corpus import BASE


class Foreign(NamedTuple):
    """`path` is in the message of the refusal; a refused import names only its module."""

    source: str
    imports: tuple[str, ...]
    path: str


_DANGEROUS = ("builtins", "io", "multiprocessing", "os", "pathlib", "pty", "shutil", "socket", "subprocess")
_CLASSES = "for cls in {}.__class__.__base__.__subclasses__():\n    if cls.__name__ == 'NAME':\n        break\n"
_FRAME = "try:\n    1 / 0\nexcept Exception as e:\n    b = e.__traceback__.tb_frame.f_back.f_globals['__builtins__']\n"
_BUILTINS = "import sys\nb = sys._getframe().f_builtins\ni = b['__import__']\ni('os').system(':')"


def _snippets() -> dict[str, Foreign]:
    """Returns programs of the kinds that smolagents' local executor refuses and that reach an unauthorized module."""
    rows: dict[str, Foreign] = {}
    for module in (*_DANGEROUS, "posix", "sys"):
        rows[f"import of {module}"] = Foreign(f"import {module}", (), f"Import of {module} ")
    for module in _DANGEROUS:
        look = f"import sys\nx = sys.modules['{module}']"
        rows[f"sys.modules, {module}"] = Foreign(look, ("sys",), f"sys.modules['{module}']")
        rows[f"sys.modules, {module}, asked for"] = Foreign(
            f"import sys\nx = sys.modules.get('{module}')", ("sys",), f"sys.modules['{module}']"
        )
        rows[f"member of {module}"] = Foreign(f"from {module} import __name__", (), f"Import of {module} ")
    rows |= {
        "builtins, print": Foreign("import builtins; builtins.print(1)", (), "Import of builtins "),
        "builtins, exec": Foreign("import builtins; builtins.exec", (), "Import of builtins "),
        "os, popen": Foreign("import os; os.popen", (), "Import of os "),
        "os, in a function": Foreign("def f():\n    import os\n    os.system(':')\nf()", (), "Import of os "),
        "os.path": Foreign("import os.path", (), "Import of os.path "),
        "os as another": Foreign("import os as math", (), "Import of os "),
        "sys.modules, not authorized": Foreign("import sys\nsys.modules['os'].system(':')", (), "Import of sys "),
        "sys.modules, used": Foreign("import sys\nsys.modules['os'].system(':')", ("sys",), "sys.modules['os']"),
        "import_module": Foreign(
            "import importlib\nimportlib.import_module('os').system(':')", ("importlib",), "Import of os "
        ),
        "queue.threading": Foreign("import queue; queue.threading._os.system(':')", (), "queue.threading is"),
        "queue.threading._os": Foreign(
            "import queue; queue.threading._os.system(':')", ("threading",), "queue.threading._os"
        ),
        "queue.threading._sys": Foreign(
            "import queue; queue.threading._sys.modules['os'].system(':')", (), "queue.threading is"
        ),
        "queue.threading._sys.modules": Foreign(
            "import queue; queue.threading._sys.modules['os'].system(':')", ("threading",), "queue.threading._sys"
        ),
        "random._os": Foreign("import random; random._os.system(':')", (), "random._os is"),
        "random.__dict__": Foreign("import random; random.__dict__['_os'].system(':')", (), "random.__dict__['_os']"),
        "doctest.inspect": Foreign("import doctest; doctest.inspect.os.system(':')", ("doctest",), "doctest.inspect"),
        "doctest.inspect.os": Foreign(
            "import doctest; doctest.inspect.os.system(':')", ("doctest", "inspect"), "doctest.inspect.os"
        ),
        "warnings.sys": Foreign("import warnings; warnings.sys", ("warnings",), "warnings.sys"),
        "filter of partial": Foreign(
            "import functools, warnings\nlist(filter(functools.partial(getattr, warnings), ['sys']))",
            ("warnings", "functools"),
            "getattr(the module warnings, 'sys')",
        ),
        "map of getattr": Foreign(
            "import warnings\nlist(map(getattr, [warnings], ['sys']))",
            ("warnings",),
            "getattr(the module warnings, 'sys')",
        ),
        "map of partial": Foreign(
            "import functools, warnings\nlist(map(functools.partial(getattr, warnings), ['sys']))",
            ("warnings", "functools"),
            "getattr(the module warnings, 'sys')",
        ),
        "builtins of a frame": Foreign(_BUILTINS, ("sys",), "Import of os "),
        "builtins of a frame, authorized": Foreign(_BUILTINS, ("sys", "builtins"), "Import of os "),
        "frame of a traceback": Foreign(_FRAME + "    b['__import__']('os').system(':')", (), "f_back.f_globals"),
        "frame, all authorized but that": Foreign(
            _FRAME + "    b['__import__']('os').system(':')", ("builtins", "os"), "f_back.f_globals"
        ),
        "BuiltinImporter": Foreign(
            _CLASSES.replace("NAME", "BuiltinImporter") + "cls().load_module('posix').system(':')",
            (),
            "BuiltinImporter of",
        ),
        "Popen in a loop": Foreign(
            "for cls in ().__class__.__base__.__subclasses__():\n"
            "    if 'Popen' in cls.__class__.__repr__(cls):\n        break\ncls(['sh', '-c', ':']).wait()",
            (),
            "__subclasses__()",
        ),
        "Popen in a comprehension": Foreign(
            "[c for c in ().__class__.__base__.__subclasses__() "
            "if 'Popen' in c.__class__.__repr__(c)][0](['sh', '-c', ':']).wait()",
            (),
            "__subclasses__()",
        ),
    }
    for depth, imports in enumerate((("asyncio",), ("asyncio", "asyncio.base_events"), ("asyncio.*",))):
        rows[f"asyncio's subprocess, {depth}"] = Foreign(
            "import asyncio; asyncio.base_events.events.subprocess", imports, "asyncio.base_events.events.subprocess"
        )
    for imports in ((), ("warnings",), ("warnings", "builtins")):
        rows[f"catch_warnings, {len(imports)}"] = Foreign(
            _CLASSES.replace("NAME", "catch_warnings")
            + "b = cls()._module.__builtins__\nb['__import__']('os').system(':')",
            imports,
            "Import of os " if imports else "catch_warnings of",
        )
    return rows


SNIPPETS = _snippets()

_ANY = "import random\nclass Any(type):\n    def __instancecheck__(cls, instance): return True\n"
# Attacks of the same kind, and others.
_OWN_ATTACKS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "from import": ("from random import _os", (), "from random import _os"),
    "from import as": ("from random import _os as m\nm.system(':')", (), "from random import _os"),
    "alias of the module": ("import random\nx = random\nx._os", (), "x._os"),
    "in a list": ("import random\n[random][0]._os", (), "…._os"),
    "argument": ("import random\n(lambda m: m._os)(random)", (), "m._os"),
    "second step of a chain": ("import statistics\nstatistics.random._os", (), "statistics.random._os"),
    "getattr": ("import random\ngetattr(random, '_o' + 's')", (), "getattr(the module random, '_os')"),
    "getattr with a default": ("import random\ngetattr(random, '_os', None)", (), "'_os')"),
    "getattr of a text that lies": (
        "import random\nclass S(str):\n    def __eq__(self, o): return False\n    def __hash__(self): return 1\n"
        "getattr(random, S('__dict__'))['_os']",
        (),
        "['_os']",
    ),
    "reduce of getattr": (
        "import functools, random\nfunctools.reduce(getattr, ['_os'], random)",
        ("functools",),
        "_os",
    ),
    "attrgetter": ("import operator, random\noperator.attrgetter('_os')(random)", ("operator",), "_os"),
    "attrgetter as a member": (
        "from operator import attrgetter as a\nimport random\na('_os')(random)",
        ("operator",),
        "",
    ),
    "methodcaller": (
        "import operator, random\noperator.methodcaller('__getattribute__', '_os')(random)",
        ("operator",),
        "",
    ),
    "vars": ("import random\nvars(random)['_os']", (), "vars(…)['_os']"),
    "vars, get": ("import random\nvars(random).get('_os')", (), "['_os']"),
    "vars, pop": ("import random\nvars(random).pop('_os')", (), "['_os']"),
    "vars, values": (
        "import random\n[v for v in vars(random).values() if str(v).startswith('<module \\'os')][0].system",
        (),
        "['_os']",
    ),
    "vars, items": ("import random\ndict(vars(random).items())['_os'].system", (), "['_os']"),
    "vars, unpacked": ("import random\n{**vars(random)}['_os'].system", (), "['_os']"),
    "vars, as keywords": ("import random\n(lambda **k: k['_os'])(**vars(random)).system", (), "['_os']"),
    "vars, run in": ("import random\nexec('_os.system', vars(random))", (), "['_os']"),
    "vars, evaluated in": ("import random\neval('_os.system', random.__dict__)", (), "['_os']"),
    "vars, copied": ("import random\nvars(random).copy()['_os'].system", (), "['_os']"),
    "__getattribute__": ("import random\nrandom.__getattribute__('_os')", (), "__getattribute__('_os')"),
    "object.__getattribute__": ("import random\nobject.__getattribute__(random, '_os')", (), "('_os')"),
    "__getattribute__ of the type": ("import random\ntype(random).__getattribute__(random, '_os')", (), "('_os')"),
    "__dict__ by __getattribute__": ("import random\nrandom.__getattribute__('__dict__')['_os']", (), "['_os']"),
    "globals of a method": ("import random\nrandom.Random.seed.__globals__['_os']", (), "['_os']"),
    "globals of a method, kept": ("import random\ng = random.Random.seed.__globals__\ng['_os']", (), "['_os']"),
    "globals by getattr": ("import random\ngetattr(random.Random.seed, '__globals__')['_os']", (), "['_os']"),
    "globals of a library's class": (
        "c = [c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0]\nc.__init__.__globals__",
        (),
        "_wrap_close of",
    ),
    "subclasses of type": (
        "c = [c for c in type.__subclasses__(object) if c.__name__ == '_wrap_close'][0]\nc.__init__",
        (),
        "_wrap_close of",
    ),
    "subclasses by the dict of type": (
        "c = [c for c in type.__dict__['__subclasses__'](object) if c.__name__ == '_wrap_close'][0]\nc.__init__",
        (),
        "_wrap_close of",
    ),
    "subclasses by getattr": (
        "c = [c for c in getattr(object, '__subclasses__')() if c.__name__ == '_wrap_close'][0]\nc()",
        (),
        "_wrap_close of",
    ),
    "subclasses, instance": (
        "c = [c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0]\nc(1, 2)",
        (),
        "_wrap_close of",
    ),
    "descriptor of functions": (
        "import random\ntype(lambda: 0).__globals__.__get__(random.Random.seed)['_os']",
        (),
        "__globals__",
    ),
    "descriptor in a dict": (
        "import random\ntype(lambda: 0).__dict__['__globals__'].__get__(random.Random.seed)",
        (),
        "__globals__",
    ),
    "__self__": ("print.__self__.__import__('os')", (), "print.__self__"),
    "__self__ of an unbound one": ("len.__self__", (), "len.__self__"),
    "__builtins__ of a module": ("import random\nrandom.__builtins__['__import__']('os')", (), "Import of os "),
    "__builtins__ of the program": ("__builtins__['__import__']('os')", (), "Import of os "),
    "frame of a generator": (
        "import statistics\ndef f(): yield\nf().gi_frame.f_builtins['__import__']('os')",
        (),
        "Import of os ",
    ),
    "caller's frame": ("import sys\nsys._getframe(1).f_globals['sys']", ("sys",), "f_globals"),
    "PathFinder": (
        "import importlib.machinery as m\nm.PathFinder.find_spec('subprocess').loader.load_module('subprocess')",
        ("importlib.*",),
        "subprocess",
    ),
    "exec_module": (
        "import importlib.machinery as m, types\nm.PathFinder.find_spec('subprocess').loader"
        ".exec_module(types.ModuleType('x'))",
        ("importlib.*", "types"),
        "subprocess",
    ),
    "_gcd_import": ("import importlib\nimportlib._bootstrap._gcd_import('subprocess')", ("importlib",), "subprocess"),
    "importlib.sys": ("import importlib\nimportlib.sys.modules['os']", ("importlib",), "importlib.sys"),
    "getmodule": ("import inspect, helper\ninspect.getmodule(helper.join)", ("inspect", "helper"), "getmodule()"),
    "getmodule as a member": (
        "from inspect import getmodule as g\nimport helper\ng(helper.join)",
        ("inspect", "helper"),
        "getmodule()",
    ),
    "getmodule in map": (
        "import inspect, helper\nlist(map(inspect.getmodule, [helper.join]))",
        ("inspect", "helper"),
        "getmodule()",
    ),
    "getmembers": (
        "import inspect, random\n[v for n, v in inspect.getmembers(random) if n == '_os'][0].system",
        ("inspect",),
        "getmembers",
    ),
    "getattr_static": ("import inspect, random\ninspect.getattr_static(random, '_os')", ("inspect",), "getattr_static"),
    "gc.get_objects": (
        "import gc, helper\n[o for o in gc.get_objects() if getattr(o, '__name__', '') == 'pty'][0].system",
        ("gc", "helper"),
        "get_objects()",
    ),
    "gc.get_referents": (
        "import gc, random\n[o for o in gc.get_referents(vars(random)) if str(o).startswith(\"<module 'os'\")][0].system",
        ("gc",),
        "['_os']",
    ),
    "sys.modules, get": ("import sys\nsys.modules.get('os')", ("sys",), "sys.modules['os']"),
    "sys.modules, as": ("from sys import modules as m\nm['os']", ("sys",), "['os']"),
    "sys.modules, values": (
        "import sys\n[m for m in sys.modules.values() if getattr(m, '__name__', '') == 'os'][0].system",
        ("sys",),
        "['os']",
    ),
    "sys.modules, unpacked": ("import sys\n{**sys.modules}['os'].system", ("sys",), "['os']"),
    "sys.modules, by getattr": ("import sys\ngetattr(sys, 'modules')['os']", ("sys",), "['os']"),
    "from text": ("import random\neval('random._os')", (), "random._os"),
    "executed": ("exec('import random\\nx = random._os')", (), "random._os"),
    "compiled": ("import random\neval(compile('random._os', 'f', 'eval'))", (), "random._os"),
    "format": ("import random\n'{0._os.sep}'.format(random)", (), "_os"),
    "format in map": ("import random\nlist(map('{0._os.sep}'.format, [random]))", (), "_os"),
    "format of a variable": ("import random\nt = '{0._os.sep}'\nt.format(random)", (), "_os"),
    "format_map": ("import random\n'{m._os.sep}'.format_map({'m': random})", (), "_os"),
    "str.format": ("import random\nstr.format('{0._os.sep}', random)", (), "_os"),
    "Formatter": ("import random, string\nstring.Formatter().format('{0._os.sep}', random)", ("string",), "_os"),
    "f-string": ("import random\nf'{random._os.sep}'", (), "random._os"),
    "handled": ("import random\ntry:\n    random._os\nexcept BaseException:\n    pass", (), "random._os"),
    "in a thread": (
        "import random, threading\nt = threading.Thread(target=lambda: random._os.system)\nt.start()\nt.join()",
        ("threading",),
        "random._os",
    ),
    "in a class": ("import random\nclass C:\n    o = random._os", (), "random._os"),
    "in a comprehension": ("import random\n[m._os for m in (random,)]", (), "m._os"),
    "walrus": ("import random\n(o := random)._os", (), "…._os"),
    "another name than the module's": ("import json\njson.codecs", ("json",), "json.codecs"),
    "a third party's": ("import pandas\npandas.core.frame.np.sum", ("pandas",), "pandas.core.frame.np"),
    "attribute of an instance": ("import warnings\nwarnings.catch_warnings()._module.sys", ("warnings",), "sys"),
    "star of a module of one's own": ("from helper import *\nos.system(':')", ("helper",), "from helper import os"),
    "module of one's own": ("import helper\nhelper.os.system(':')", ("helper",), "helper.os"),
    "unusual name": ("import helper\nhelper.strange_name.getcwd()", ("helper",), "helper.strange_name"),
    "in a closure": ("import helper\nhelper.closed().__closure__[0].cell_contents", ("helper",), "cell_contents"),
    "by a pattern": ("import random\nmatch random:\n    case object(_os=o): o.system", (), "_os"),
    "by a pattern with a condition": ("import random\nmatch random:\n    case object(_os=o) if o.sep: pass", (), "_os"),
    "by a pattern without any other attribute": (
        "import random\nmatch random:\n    case object(_os=o): pass",
        (),
        "random._os",
    ),
    "by a pattern inside one": (
        "import random\nmatch [random]:\n    case [object(_os=object(sep=s))]: pass",
        (),
        "_os in a pattern of object",
    ),
    "by a pattern with alternatives": (
        "import random\nmatch random:\n    case object(_os=o) | object(_x=o): pass",
        (),
        "_os in a pattern of object",
    ),
    "by a pattern of a mapping": (
        "import random\nmatch random:\n    case object(__dict__={'_os': o}): pass",
        (),
        "__dict__ in a pattern of object",
    ),
    "builtins by a pattern": (
        "import random\nmatch random.Random.seed:\n    case object(__builtins__=b): b['__import__']('os')",
        (),
        "Import of os ",
    ),
    "by the position in a pattern": (
        _ANY + "class K(metaclass=Any): __match_args__ = ('_os',)\nmatch random:\n    case K(o): pass",
        (),
        "random._os",
    ),
    "by the position in a pattern, inside one": (
        _ANY + "class K(metaclass=Any): __match_args__ = ('_os',)\nmatch random:\n    case K(object()): pass",
        (),
        "_os in a pattern of K",
    ),
    "by a pattern of a class that takes every object for its own": (
        "import random, collections\nclass K(collections.UserDict):\n    @classmethod\n"
        "    def __subclasshook__(cls, other): return True\n"
        "match random:\n    case K(_os=object(popen=p)): p('id')",
        (),
        "_os in a pattern of K",
    ),
    "by a pattern of one's own kind of module": (
        "import random\nclass K(type(random)): pass\nrandom.__class__ = K\nmatch random:\n    case K(_os=object()): pass",
        (),
        "_os in a pattern of K",
    ),
    "by a comparison in a pattern": (
        "import random\nclass Spy:\n    def __eq__(self, other): Spy.seen = other\n"
        "match Spy():\n    case random._os.system: pass",
        (),
        "random._os",
    ),
    "by a key in a pattern": (
        "import random\nclass Spy(dict):\n    def get(self, key, *default): Spy.seen = key\n"
        "match Spy():\n    case {random._os.system: _}: pass",
        (),
        "random._os",
    ),
    "own __getattribute__": (
        "import random\nclass M(type(random)):\n    def get(self): return super().__getattribute__('_os')\n"
        "m = M('m')\nm._os = 1\nM.get(m)\nobject.__getattribute__(random, '_os')",
        (),
        "'_os'",
    ),
}
ATTACKS = {name: Foreign(*row) for name, row in _OWN_ATTACKS.items()}

HELPER = """\
import builtins, io, multiprocessing, os, pathlib, pty, shutil, socket, subprocess
import os as strange_name
from os.path import join
def closed():
    module = os
    def inner(): return module
    return inner
"""

_EVENT = "import dataclasses\n@dataclasses.dataclass\nclass Event:\n    time: object\n    code: object\n"
# Programs that succeed under `guarded` as they do without a rule.
HONEST: dict[str, tuple[str, tuple[str, ...], object]] = {
    "class of one's own": ("class A: pass\nA().__class__.__name__", (), "A"),
    "dict of one's own": ("class A: pass\na = A()\na.x = 1\na.__dict__", (), {"x": 1}),
    "dict of one's own is written": ("class A: pass\na = A()\na.__dict__['x'] = 1\na.__dict__ |= {}\na.x", (), 1),
    "vars of one's own": ("class A: pass\na = A()\nvars(a)['x'] = 2\na.x", (), 2),
    "vars of nothing": ("def f(x): return vars()\nf(1)", (), {"x": 1}),
    "dict of a class": ("class A:\n    x = 1\nA.__dict__['x']", (), 1),
    "mro": ("class A: pass\n[c.__name__ for c in A.__mro__]", (), ["A", "object"]),
    "subclasses of one's own": (
        "class A: pass\nclass B(A): pass\n[c() for c in A.__subclasses__()][0].__class__ is B",
        (),
        True,
    ),
    "subclasses of an exception": ("'OSError' in [c.__name__ for c in Exception.__subclasses__()]", (), True),
    "names of all classes": ("len([c.__module__ + repr(c) for c in object.__subclasses__()]) > 50", (), True),
    "globals of one's own": ("x = 5\ndef f(): pass\nf.__globals__['x']", (), 5),
    "frame of one's own": ("import sys\nx = 6\nsys._getframe().f_globals['x']", ("sys",), 6),
    "locals of a frame": ("import sys\ndef f(a): return sys._getframe().f_locals['a']\nf(7)", ("sys",), 7),
    "closure": ("def f(x):\n    return lambda: x\nf(8).__closure__[0].cell_contents", (), 8),
    "attribute named os": ("class A: pass\na = A()\na.os = 'linux'\na.sys = [1]\n(a.os, a.sys[0])", (), ("linux", 1)),
    "attribute named modules": ("class A: pass\na = A()\na.modules = {'x': 1}\na.modules['x']", (), 1),
    "own load_module": ("class A:\n    def load_module(self, x): return x\nA().load_module(3)", (), 3),
    "own __getattribute__": (
        "class A:\n    def __getattribute__(self, n):\n        return object.__getattribute__(self, n) if n != 'q' else 9\n"
        "    def m(self): return self.y\na = A()\na.y = 1\n(a.q, a.m())",
        (),
        (9, 1),
    ),
    "own __dict__ in __init__": (
        "class D:\n    def __init__(self, **k): self.__dict__.update(k)\nD(a=1, b=2).b",
        (),
        2,
    ),
    "own slots": (
        "class S:\n    __slots__ = ('modules',)\ns = S()\ns.modules = 4\n(s.modules, 'modules' in S.__dict__)",
        (),
        (4, True),
    ),
    "eval": ("eval('1 + 1')", (), 2),
    "exec": ("exec('y = 4')\ny", (), 4),
    "exec in a namespace": ("n = {}\nexec('z = 5', n)\nn['z']", (), 5),
    "files": ("open('a.txt', 'w').write('abc')\nopen('a.txt').read()", (), "abc"),
    "getattr": ("getattr('abc', 'upper')() + getattr(1, 'no', 'x')", (), "ABCx"),
    "getattr missing": (
        "try:\n    getattr(1, 'nope')\nexcept AttributeError as e:\n    r = str(e)\nr",
        (),
        "'int' object has no attribute 'nope'",
    ),
    "names of a module": (
        "import math\n('pi' in vars(math), 'pi' in dir(math), vars(math)['pi'] > 3)",
        (),
        (True, True, True),
    ),
    "functions of a module": ("import math\nlen([n for n, v in vars(math).items() if callable(v)]) > 30", (), True),
    "module is changed": ("import random\nvars(random)['mine'] = 3\nrandom.mine", (), 3),
    "source of a module": ("import random\nrandom.__name__, random.__doc__ is None", (), ("random", False)),
    "submodule of a package": ("import numpy\nint(numpy.linalg.norm([3, 4]))", ("numpy",), 5),
    "random of numpy": (
        "import numpy as np\nnp.random.seed(1)\nnp.random.default_rng(1) is not None",
        ("numpy",),
        True,
    ),
    "submodule kept": ("import numpy as np\nla = np.linalg\nint(la.det([[2, 0], [0, 3]]) + 0.5)", ("numpy",), 6),
    "pandas.io": ("import pandas\npandas.io.__name__", ("pandas",), "pandas.io"),
    "pandas": (
        "import pandas as pd\ndf = pd.DataFrame({'time': [1, 2], 'code': ['a', 'b']})\n(int(df.time.sum()), df.code.tolist())",
        ("pandas",),
        (3, ["a", "b"]),
    ),
    "pandas api": ("import pandas as pd\npd.api.types.is_numeric_dtype(pd.Series([1]).dtype)", ("pandas",), True),
    "pyplot": (
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2])\nplt.close(fig)\nplt.cm.viridis.name",
        ("matplotlib.pyplot",),
        "viridis",
    ),
    "os.path": ("import os\nos.path.basename('a/b')", ("os",), "b"),
    "os.path kept": ("import os\np = os.path\np.join('a', 'b')", ("os.path",), "a/b"),
    "collections.abc": ("import collections\ncollections.abc.Sized.__name__", (), "Sized"),
    "datetime": ("import datetime\ndatetime.datetime(2024, 1, 1).date().isoformat()", (), "2024-01-01"),
    "time of a datetime": ("import datetime\nd = datetime.datetime(2024, 1, 1, 5)\nt = d.time\nt().hour", (), 5),
    "twin of C": ("import random\nrandom._random.__name__", (), "_random"),
    "concurrent.futures": (
        "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor.__name__",
        ("concurrent.futures",),
        "ThreadPoolExecutor",
    ),
    "xml": ("import xml.etree.ElementTree as ET\nET.fromstring('<a/>').tag", ("xml.etree.ElementTree",), "a"),
    "is a module there": (
        "import sys\n('math' in sys.modules, sys.modules['math'].floor(2.5), len(sys.modules) > 9)",
        ("sys",),
        (True, 2, True),
    ),
    "own module in sys.modules": (
        "import sys, types\nm = types.ModuleType('mine')\nm.x = 1\nsys.modules['mine'] = m\nimport mine\n(mine.x, sys.modules['mine'] is m)",
        ("sys", "types", "mine"),
        (1, True),
    ),
    "own module": ("import types\nm = types.ModuleType('os')\nm.path = 3\nm.path", ("types",), 3),
    "sys of itself": ("import sys\nsys.modules['__main__'].__name__", ("sys",), "__main__"),
    "star of a module of one's own": ("from helper import *\nclosed().__name__", ("helper",), "inner"),
    "garbage": ("import gc\ngc.collect() >= 0, len(gc.get_objects()) > 10", ("gc",), (True, True)),
    "inspect": (
        "import inspect\nclass A:\n    def f(self, a, b=1): pass\n([n for n, _ in inspect.getmembers(A) if n == 'f'], str(inspect.signature(A.f)))",
        ("inspect",),
        (["f"], "(self, a, b=1)"),
    ),
    "attrgetter": (
        "from operator import attrgetter\nclass P:\n    def __init__(self, x): self.x = x\n[p.x for p in sorted([P(2), P(1)], key=attrgetter('x'))]",
        ("operator",),
        [1, 2],
    ),
    "format": ("'{} {0.real}'.replace('{} ', '').format(3), '{:.2f} {}'.format(1.5, 'x')", (), ("3", "1.50 x")),
    "format of one's own": ("class A:\n    os = 'x'\n'{0.os}'.format(A())", (), "x"),
    "import by name": ("__import__('math').floor(2.5)", (), 2),
    "loader is looked at": ("import random\nrandom.__spec__.name", (), "random"),
    "match": (
        "class P:\n    __match_args__ = ('x',)\n    def __init__(self): self.x, self.time = 1, 2\nmatch P():\n    case P(1, time=t): r = t\nr",
        (),
        2,
    ),
    "match with a condition": (
        "class P:\n    def __init__(self): self.time = 2\nmatch P():\n    case P(time=t) if t == 3: r = 0\n    case P(time=t) if t == 2: r = 1\nr",
        (),
        1,
    ),
    "match of a dataclass": (
        _EVENT + "match Event(2, Event(4, 'a')):\n"
        "    case Event(code=Event(time=u, code='a' | 'b' as v), time=int(t)) if u == 4: r = t, u, v\nr",
        ("dataclasses",),
        (2, 4, "a"),
    ),
    "match of a dataclass by position": (
        _EVENT + "match Event(2, Event(4, [5])):\n    case Event(t, Event(int() | str() as u, [v])): r = t, u, v\nr",
        ("dataclasses",),
        (2, 4, 5),
    ),
    "match of an enumeration": (
        "import enum\n" + _EVENT + "class Code(enum.Enum):\n    A = 1\n"
        "match Event(1, Code.A):\n    case Event(code=Code.A, time=t) | Event(time=1, code=t): r = t\nr",
        ("dataclasses", "enum"),
        1,
    ),
    "match of alternatives": (
        "r = []\nfor each in (1, 'a', 2.5, None, [3]):\n    match each:\n        case int(n) | float(n): r += [n]\n"
        "        case str(n): r += [n]\n        case [int(n)]: r += [n]\n        case None: r += [0]\nr",
        (),
        [1, "a", 2.5, 0, 3],
    ),
    "match of an error": (
        "match OSError(2, 'x'):\n    case OSError(errno=1): r = 0\n    case OSError(errno=n, args=(_, m)) as e: r = n, m\nr",
        (),
        (2, "x"),
    ),
    "match without the attribute": (
        "class A: pass\nmatch A():\n    case A(time=never): r = 1\n    case A(): r = 2\n(r, 'never' in globals())",
        (),
        (2, False),
    ),
    "match of constants": ("import math\nmatch 1:\n    case math.pi: r = 1\n    case _: r = 2\nr", (), 2),
    "module that is missing": ("try:\n    import math.nothing\nexcept ImportError:\n    r = 1\nr", ("math.*",), 1),
    "name that a module lacks": ("try:\n    from math import nothing\nexcept ImportError:\n    r = 1\nr", (), 1),
    "attribute that a module lacks": (
        "import math\ntry:\n    math.nothing\nexcept AttributeError as e:\n    r = str(e)\nr",
        (),
        "module 'math' has no attribute 'nothing'",
    ),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\nP(1).__dict__, dataclasses.asdict(P(2))",
        ("dataclasses",),
        ({"x": 1}, {"x": 2}),
    ),
    "typing": (
        "import typing\ntyping.get_type_hints(type('A', (), {'__annotations__': {'x': int}}))['x'].__name__",
        ("typing",),
        "int",
    ),
}


LIBRARIES = frozenset(("matplotlib.pyplot", "numpy", "pandas"))
"""Modules that not every Python at hand has."""


def authorized(imports: tuple[str, ...]) -> tuple[str, ...]:
    return (*BASE, *imports)
