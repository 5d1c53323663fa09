"""Programs for the rules of the language: those that `strict` refuses, each with its rule, and those that it runs.

SMOLAGENTS_TOO marks refused programs that smolagents' local executor refuses as well; it runs the others, or can't run
such programs at all.
"""

from __future__ import annotations

from typing import NamedTuple

BASE = (
    *("collections", "datetime", "itertools", "math", "queue", "random", "re", "stat", "statistics", "time"),
    "unicodedata",
)


class Refused(NamedTuple):
    source: str
    rule: str
    imports: tuple[str, ...] = ()
    smolagents_too: bool = True


REFUSED: dict[str, Refused] = {
    # -- modules reached through others
    "module of a module": Refused("import random\nrandom._os", "module_attributes"),
    "function of a module's module": Refused("import random\nrandom._os.getcwd()", "module_attributes"),
    "chain of modules": Refused("import queue\nqueue.threading._sys.modules", "module_attributes"),
    "getattr": Refused("import random\ngetattr(random, '_os')", "module_attributes"),
    "getattr with a default": Refused("import random\ngetattr(random, '_os', None)", "module_attributes"),
    "getattr of a made name": Refused("import random\ngetattr(random, '_' + 'os')", "module_attributes"),
    "getattr in map": Refused(
        "import warnings\nlist(map(getattr, [warnings], ['sys']))", "module_attributes", ("warnings",)
    ),
    "getattr in filter": Refused(
        "import warnings, functools\nlist(filter(functools.partial(getattr, warnings), ['sys']))",
        "module_attributes",
        ("warnings", "functools"),
    ),
    "getattr in partial": Refused(
        "import functools, random\nfunctools.partial(getattr, random)('_os')",
        "module_attributes",
        ("functools",),
    ),
    "getattr in reduce": Refused(
        "import functools, queue\nfunctools.reduce(getattr, ['threading', '_sys'], queue)",
        "module_attributes",
        ("functools",),
    ),
    "getattr under another name": Refused("import random\ng = getattr\ng(random, '_os')", "module_attributes"),
    "sys.modules": Refused("import sys\nsys.modules['os']", "module_attributes", ("sys",)),
    "sys.modules by get": Refused("import sys\nsys.modules.get('os')", "module_attributes", ("sys",)),
    "sys.modules in a loop": Refused(
        "import sys\nfor name, m in list(sys.modules.items()):\n    if name == 'os':\n        m.sep",
        "module_attributes",
        ("sys",),
    ),
    "sys.modules unpacked": Refused(
        "import sys\n(m, *rest) = [m for name, m in sys.modules.items() if name == 'os']\nm.sep",
        "module_attributes",
        ("sys",),
        smolagents_too=False,
    ),
    "member that is a module": Refused("from random import _os\n_os.getcwd()", "module_attributes"),
    "module below": Refused("import json\njson.decoder", "module_attributes", ("json",)),
    "module below, of a package": Refused("import xml.sax\nxml.sax.handler", "module_attributes", ("xml.sax",), False),
    "attrgetter": Refused(
        "import operator, random\noperator.attrgetter('_os.path')(random)", "module_attributes", ("operator",), False
    ),
    "attrgetter as a member": Refused(
        "from operator import attrgetter\nimport random\nattrgetter('_os')(random)", "module_attributes", ("operator",)
    ),
    "attrgetter of all members": Refused(
        "from operator import *\nimport random\nattrgetter('_os')(random)", "module_attributes", ("operator",)
    ),
    "attrgetter of several": Refused(
        "import operator, random\noperator.attrgetter('Random', '_os')(random)",
        "module_attributes",
        ("operator",),
        False,
    ),
    "format": Refused("import random\n'{0._os.environ}'.format(random)", "module_attributes", (), False),
    "format_map": Refused("import random\n'{m._os.environ}'.format_map({'m': random})", "module_attributes", (), False),
    "format of the class": Refused("import random\nstr.format('{0._os}', random)", "module_attributes", (), False),
    "format with a deep width": Refused(
        "import random\n'{0:{1._os}}'.format(1, random)", "module_attributes", (), False
    ),
    "format in map": Refused("import random\nlist(map('{0._os}'.format, [random]))", "module_attributes", (), False),
    "Formatter": Refused(
        "import string, random\nstring.Formatter().format('{0._os}', random)", "module_attributes", ("string",), False
    ),
    "f-string": Refused("import random\nf'{random._os}'", "module_attributes"),
    "lambda": Refused("import random\n(lambda m: m._os)(random)", "module_attributes"),
    "comprehension": Refused("import random\n[m._os for m in (random,)]", "module_attributes"),
    "default": Refused("import random\ndef f(o=random._os): return o\nf()", "module_attributes"),
    "decorator": Refused("import random\n@random._os.fspath\ndef f(): pass", "module_attributes", (), False),
    "class body": Refused("import random\nclass C:\n    o = random._os\nC.o", "module_attributes"),
    "generator": Refused("import random\ndef g():\n    yield random._os\nnext(g())", "module_attributes", (), False),
    "with": Refused(
        "import random, threading\nwith threading.Lock() as x:\n    random._os",
        "module_attributes",
        ("threading",),
        False,
    ),
    "walrus": Refused("import random\n(o := random)._os", "module_attributes", (), False),
    "match": Refused("import random\nmatch random:\n    case m:\n        m._os", "module_attributes", (), False),
    "attribute by a pattern": Refused(
        "import random\nK = type(random)\nmatch random:\n    case K(_os=o): o", "module_attributes", (), False
    ),
    "attribute by a pattern inside one": Refused(
        "import random\nK = type(random)\nmatch random:\n    case K(_os=K(getpid=f)): f()",
        "foreign_modules",
        (),
        False,
    ),
    "await": Refused("import random\nasync def f(): return random\n(await f())._os", "module_attributes", (), False),
    "star arguments": Refused("import random\n(lambda *a, **k: a[0]._os)(*[random])", "module_attributes", (), False),
    "another module with the same name": Refused("import random\nmath = random._os", "module_attributes"),
    # -- names of the form __x__
    "classes": Refused("().__class__.__base__.__subclasses__()", "dunder_access"),
    "class": Refused("''.__class__", "dunder_access"),
    "mro": Refused("type(1).__mro__", "dunder_access"),
    "subclasses of what mro gives": Refused("int.mro()[-1].__subclasses__()", "dunder_access"),
    "globals of a function": Refused("def f(): pass\nf.__globals__", "dunder_access"),
    "code of a function": Refused("def f(): pass\ndef g(): return 1\nf.__code__ = g.__code__", "dunder_access"),
    "code by setattr": Refused("def f(): pass\nsetattr(f, '__code__', 1)", "dunder_access", (), False),
    "code by augmented assignment": Refused("def f(): pass\nf.__dict__ |= {}", "dunder_access", (), False),
    "dict of a module": Refused("import random\nrandom.__dict__['_os']", "dunder_access"),
    "getattribute": Refused("def f(): pass\nf.__getattribute__('__class__')", "dunder_access"),
    "getattribute of type": Refused("type.__getattribute__(int, '__bases__')", "dunder_access"),
    "getattr of a class": Refused("getattr(1, '__class__')", "dunder_access"),
    "getattr of a made class": Refused("getattr(1, '__cla' + 'ss__')", "dunder_access"),
    "getattr of a text that lies": Refused(
        "class S(str):\n    def startswith(self, *a): return False\ngetattr(1, S('__class__'))",
        "dunder_access",
        (),
        False,
    ),
    "hasattr": Refused("hasattr(1, '__class__')", "dunder_access", (), False),
    "delattr by statement": Refused("class C: pass\ndel C.__doc__", "dunder_access"),
    "traceback": Refused("try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__", "dunder_access"),
    "context": Refused("try:\n    1 / 0\nexcept Exception as e:\n    e.__context__", "dunder_access"),
    "builtins": Refused("__builtins__", "dunder_access"),
    "builtins rebound": Refused("__builtins__ = {}", "dunder_access", (), False),
    "builtins as an argument": Refused("def f(__builtins__): pass", "dunder_access", (), False),
    "builtins as a global": Refused("def f():\n    global __builtins__", "dunder_access", (), False),
    "builtins as an import": Refused("import math as __builtins__", "dunder_access", (), False),
    "import by name": Refused("__import__('math')", "dunder_access"),
    "build_class": Refused("__build_class__(lambda: None, 'C')", "dunder_access"),
    "loader": Refused("__loader__", "dunder_access", (), False),
    "spec of a module": Refused("import random\nrandom.__spec__", "dunder_access"),
    "reduce": Refused("(1).__reduce__()", "dunder_access"),
    "call of a method": Refused("[1].__len__()", "dunder_access"),
    "format of a class": Refused("'{0.__class__.__bases__}'.format(1)", "dunder_access", (), False),
    "format of a class by name": Refused("'{x.__class__}'.format(x=1)", "dunder_access", (), False),
    "format that is made": Refused("('{0.__cla' + 'ss__}').format(1)", "dunder_access", (), False),
    "methodcaller": Refused(
        "import operator\noperator.methodcaller('__reduce__')(1)", "dunder_access", ("operator",), False
    ),
    "attrgetter of a class": Refused(
        "import operator\noperator.attrgetter('__class__')(1)", "dunder_access", ("operator",), False
    ),
    "pattern by keyword": Refused("match 1:\n    case int(__class__=c): c", "dunder_access", (), False),
    "pattern by position": Refused(
        "class P:\n    __match_args__ = ('__class__',)\nmatch P():\n    case P(c): c", "dunder_access", (), False
    ),
    "pattern deep inside": Refused(
        "class P:\n    __match_args__ = ('__class__',)\nmatch [1, {'a': P()}]:\n    case [_, {'a': P(c)}]: c",
        "dunder_access",
        (),
        False,
    ),
    "descriptor": Refused("class C:\n    p = property(lambda self: 1)\nC.p.fget.__globals__", "dunder_access"),
    "for target": Refused("class C: pass\nfor C.__doc__ in ['x']: pass", "dunder_access", (), False),
    # -- code from text, namespaces, files, processes
    "eval": Refused("eval('1')", "dynamic_code"),
    "exec": Refused("exec('x = 1')", "dynamic_code"),
    "compile": Refused("compile('1', 'f', 'eval')", "dynamic_code"),
    "eval in map": Refused("list(map(eval, ['1']))", "dynamic_code"),
    "eval under another name": Refused("e = eval\ne('1')", "dynamic_code"),
    "eval of builtins": Refused("import builtins\nbuiltins.eval('1')", "dynamic_code", ("builtins",)),
    "eval as a member": Refused("from builtins import eval as e\ne('1')", "dynamic_code", ("builtins",)),
    "globals": Refused("globals()", "namespaces"),
    "locals": Refused("locals()", "namespaces"),
    "vars": Refused("import random\nvars(random)", "namespaces"),
    "frame of a generator": Refused("(x for x in [1]).gi_frame.f_globals", "namespaces"),
    "frame by getattr": Refused("getattr((x for x in [1]), 'gi_frame')", "namespaces", (), False),
    "frame of a coroutine": Refused("async def f(): pass\nc = f()\nc.close()\nc.cr_frame", "namespaces", (), False),
    "frame of sys": Refused("import sys\nsys._getframe().f_globals", "namespaces", ("sys",)),
    "open": Refused("open('/etc/passwd').close()", "open"),
    "open of io": Refused("import io\nio.open('/etc/passwd').close()", "open", ("io",), False),
    "os.system, not called": Refused("import os\nos.system", "dangerous_functions", ("os",)),
    "os.system": Refused("import os\nos.system('true')", "dangerous_functions", ("os",), False),
    "os.system as": Refused("import os as o\no.system('true')", "dangerous_functions", ("os",), False),
    "os.system as a member": Refused("from os import system\nsystem('true')", "dangerous_functions", ("os",), False),
    "os.system by getattr": Refused("import os\ngetattr(os, 'sys' + 'tem')('true')", "dangerous_functions", ("os",)),
    "os.popen": Refused("import os\nos.popen('true')", "dangerous_functions", ("os",), False),
    "os.execv": Refused("import os\nos.execv('/bin/true', ['true'])", "dangerous_functions", ("os",), False),
    "posix.system": Refused("import posix\nposix.system('true')", "dangerous_functions", ("posix",), False),
    "subprocess.run": Refused(
        "import subprocess\nsubprocess.run(['true'])", "dangerous_functions", ("subprocess",), False
    ),
    "Popen by getattr": Refused(
        "import subprocess\ngetattr(subprocess, 'Pop' + 'en')", "dangerous_functions", ("subprocess",), False
    ),
    "dir": Refused("dir()", "unlisted_builtins"),
    "object": Refused("object()", "unlisted_builtins"),
    "input": Refused("input()", "unlisted_builtins"),
    "bytes to be asked": Refused("isinstance(1, bytes)", "unlisted_builtins"),
    "memoryview": Refused("memoryview(b'')", "unlisted_builtins"),
    "base class": Refused("class C(object): pass", "unlisted_builtins"),
}

# Ordinary programs of agents. smolagents' local executor runs each, and so does strict, with the same value.
ORDINARY: dict[str, str] = {
    "arithmetic": "x = 3\ny = x ** 2 + 1\ny / 2",
    "strings": "name = 'ada'\nf'{name.title()}: {len(name)}'",
    "string methods": "' a, b '.strip().split(', ')",
    "format": "'{} is {:.2f}'.format('pi', 3.14159)",
    "format by name": "'{a}-{b[0]}'.format(a=1, b=[2])",
    "format_map": "'{a}'.format_map({'a': 1})",
    "percent": "'%s-%03d' % ('x', 7)",
    "joined": "', '.join(str(i) for i in range(4))",
    "list": "xs = [3, 1, 2]\nxs.sort()\nxs.append(9)\nxs[1:]",
    "comprehension": "[x * y for x in range(3) for y in range(3) if x != y]",
    "dict": "d = {'a': 1}\nd['b'] = 2\nd.update(c=3)\nsorted(d.items())",
    "nested": "data = {'rows': [{'v': 1}, {'v': 5}]}\nsum(r['v'] for r in data['rows'])",
    "set": "sorted({1, 2, 3} & {2, 3, 4})",
    "unpacking": "a, (b, c) = 1, (2, 3)\na + b + c",
    "slices": "'abcdefgh'[1:7:2]",
    "while": "n, steps = 27, 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nsteps",
    "function": "def area(w, h=2):\n    return w * h\narea(3) + area(3, h=4)",
    "recursion": "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\nfib(12)",
    "lambda": "sorted(['bb', 'a', 'ccc'], key=lambda s: -len(s))",
    "map and filter": "list(map(str, filter(lambda x: x % 2, range(6))))",
    "zip": "dict(zip('abc', [1, 2, 3]))",
    "enumerate": "[f'{i}{c}' for i, c in enumerate('xy')]",
    "class": (
        "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
        "        self.balance = balance\n    def deposit(self, amount):\n        self.balance += amount\n"
        "        return self.balance\na = Account('ada')\na.deposit(5)\na.deposit(7)"
    ),
    "class with __str__": "class P:\n    def __init__(self, x):\n        self.x = x\n    def __str__(self):\n        return f'P({self.x})'\nstr(P(3))",
    "class with __len__": "class P:\n    def __len__(self):\n        return 4\nlen(P())",
    "inheritance": "class A:\n    def who(self):\n        return 'A'\nclass B(A):\n    pass\nB().who()",
    "try": "try:\n    int('x')\nexcept ValueError as e:\n    r = 'bad'\nr",
    "try finally": "out = []\ntry:\n    out.append(1)\nfinally:\n    out.append(2)\nout",
    "raise": "def f():\n    raise ValueError('no')\ntry:\n    f()\nexcept ValueError as e:\n    r = str(e)\nr",
    "math": "import math\nround(math.sqrt(2) + math.pi, 4)",
    "from math": "from math import floor, ceil\nfloor(2.7) + ceil(2.1)",
    "random": "import random\nrandom.seed(1)\n1 <= random.randint(1, 6) <= 6",
    "datetime": "import datetime\n(datetime.date(2024, 3, 1) - datetime.date(2024, 2, 1)).days",
    "datetime members": "from datetime import datetime, timedelta\n(datetime(2024, 1, 1) + timedelta(days=1)).strftime('%Y-%m-%d')",
    "re": "import re\nre.findall(r'\\d+', 'a1b22')",
    "re compiled": "import re\nre.compile('(a)(b)').match('ab').group(2)",
    "collections": "from collections import Counter\nCounter('abca').most_common(1)",
    "defaultdict": "from collections import defaultdict\nd = defaultdict(list)\nd['a'].append(1)\ndict(d)",
    "itertools": "import itertools\nlist(itertools.permutations([1, 2, 3], 2))",
    "statistics": "import statistics\nstatistics.mean([1, 2, 3, 4])",
    "queue": "import queue\nq = queue.Queue()\nq.put(1)\nq.get()",
    "unicodedata": "import unicodedata\nunicodedata.name('a')",
    "time": "import time\ntime.time() > 0",
    "sorting records": "rows = [{'n': 'b', 'v': 2}, {'n': 'a', 'v': 2}]\n[r['n'] for r in sorted(rows, key=lambda r: (r['v'], r['n']))]",
    "ternary": "x = 5\n'big' if x > 3 else 'small'",
    "chained comparison": "1 < 2 <= 2 != 3",
    "boolean values": "[] or 'empty'",
    "augmented items": "d = {'a': [1]}\nd['a'] += [2]\nd",
    "deletion": "d = {'a': 1, 'b': 2}\ndel d['a']\nd",
    "getattr": "getattr('abc', 'upper')()",
    "type": "type(3)(4.5)",
    "isinstance": "isinstance(3, (int, float)) and not isinstance('a', int)",
    "name of the program": "__name__ == '__main__'",
    "print": "print('a', 1)\n2",
}

# Python that the local executor can't run, for other reasons than safety. Strict runs it.
MORE_PYTHON: dict[str, tuple[str, object]] = {
    "generator": ("def g():\n    yield 1\n    yield 2\nlist(g())", [1, 2]),
    "global": ("n = 1\ndef f():\n    global n\n    n += 1\nf()\nn", 2),
    "nonlocal": (
        "def f():\n    n = 1\n    def g():\n        nonlocal n\n        n += 1\n    g()\n    return n\nf()",
        2,
    ),
    "match": ("match {'k': [1, 2]}:\n    case {'k': [a, *rest]}:\n        r = a, rest\nr", (1, [2])),
    "match by class": (
        "class P:\n    __match_args__ = ('x', 'y')\n    def __init__(self):\n        self.x, self.y = 1, 2\n"
        "match P():\n    case P(0, y): r = 'no'\n    case P(1, y): r = y\nr",
        2,
    ),
    "match inside a class pattern": (
        "class P:\n    __match_args__ = ('x', 'y')\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n"
        "match P(1, P(2, [3])):\n    case P(x, y=P(int(y), [z])): r = x, y, z\nr",
        (1, 2, 3),
    ),
    "match of builtins": ("match 3:\n    case str(s): r = 's'\n    case int(n): r = n\nr", 3),
    "walrus": ("[y for x in range(4) if (y := x * 2) > 2]", [4, 6]),
    "star": ("a, *b = 1, 2, 3\nb", [2, 3]),
    "super": (
        "class A:\n    def __init__(self, x):\n        self.x = x\nclass B(A):\n    def __init__(self):\n"
        "        super().__init__(3)\nB().x",
        3,
    ),
    "private names": (
        "class A:\n    def __init__(self):\n        self.__x = 4\n    def get(self):\n        return self.__x\nA().get()",
        4,
    ),
    "property": ("class A:\n    @property\n    def x(self):\n        return 5\nA().x", 5),
    "context manager": (
        "class C:\n    def __enter__(self):\n        return 6\n    def __exit__(self, *a):\n        pass\nwith C() as x:\n    pass\nx",
        6,
    ),
    "own builtin": ("def compile(x):\n    return x * 2\ncompile(4)", 8),
    "own variable": ("input = [1, 2]\nsum(input)", 3),
    "await": ("async def f():\n    return 7\nawait f()", 7),
    "annotations": ("def f(x: bytes | None = None) -> object:\n    return 8\nf()", 8),
    "format numbers": ("'{} {:{}} {}'.format(1, 2, 4, 'x')", "1    2 x"),
    "format of items": ("'{0[a]} {x.real}'.format({'a': 1}, x=2)", "1 2"),
    "default of getattr": ("getattr(1, 'nothing', 9)", 9),
    "setattr": ("class A: pass\na = A()\nsetattr(a, 'x', 1)\nhasattr(a, 'x'), a.x", (True, 1)),
}
