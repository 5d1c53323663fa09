"""What kind of module an object is, what it is called, and which names are Python's own modules."""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeGuard

_DICT: Any = type.__dict__["__dict__"].__get__(ModuleType)["__dict__"]


def is_module(value: object) -> TypeGuard[ModuleType]:
    """Decides by the type: an object's `__class__` can claim to be a module, as cffi's objects do."""
    return issubclass(type(value), ModuleType)


def name_of(module: ModuleType) -> str:
    return str(names_of(module).get("__name__"))


def class_module(cls: type) -> str:
    """Returns a class's `__module__`, bypassing a metaclass that overrides it."""
    return str(type.__dict__["__module__"].__get__(cls, type))


def names_of(module: ModuleType) -> dict[str, Any]:
    """Returns a module's names, bypassing a `__dict__` of its class: reading some of them loads all parts, or fails."""
    names: Any = _DICT.__get__(module)
    return names if type(names) is dict else {}


def source_file(loader: object) -> Any:
    """Returns the file that Python's own loader of sources loads; None for any other loader."""
    kind = sys.modules["_frozen_importlib_external"].SourceFileLoader  # importlib.machinery costs a checker memory
    return loader.path if type(loader) is kind else None  # type: ignore[attr-defined]


_names: set[str] = set()


def standard_modules() -> set[str]:
    """Returns the names of Python's own modules. The set is built at its first use, because few sessions need it."""
    if not _names:
        _names.update((*getattr(sys, "stdlib_module_names", ()), *_LISTED.split()))
    return _names


def public_name(module: str) -> str:
    """Returns the name by which a program imports the contents of a module written in C: `os` for `posix`."""
    top, dot, rest = module.partition(".")
    if module in _PUBLIC:
        return _PUBLIC[module]
    return f"{top.lstrip('_')}{dot}{rest}" if is_standard(top) and top.strip("_") in standard_modules() else module


def is_standard(module: str) -> bool:
    """True for a module of Python itself, or one in it."""
    top = module.partition(".")[0]
    return top in standard_modules() or top.lstrip("_") in standard_modules()


_PUBLIC = {
    "posix": "os",
    "nt": "os",
    "genericpath": "os.path",
    "ntpath": "os.path",
    "posixpath": "os.path",
    "_collections_abc": "collections.abc",
    "_frozen_importlib": "importlib",
    "_frozen_importlib_external": "importlib",
    "_posixsubprocess": "subprocess",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_sre": "re",
    "_thread": "threading",
    "_weakrefset": "weakref",
}
# Modules of CPython 3.9, which has no sys.stdlib_module_names, and of each later version. A name that begins with _
# counts as the one without.
_LISTED = """
    __future__ _bootlocale
    __phello__ _aix_support _blake2 _bootsubprocess _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp
    _codecs_kr _codecs_tw _collections_abc _compat_pickle _compression _ctypes_test _curses_panel _dummy_thread
    _elementtree _frozen_importlib _frozen_importlib_external _gdbm _lsprof _markupbase _md5 _msi
    _multibytecodec _osx_support _overlapped _posixshmem _posixsubprocess _py_abc _pydecimal _pyio _scproxy
    _sha1 _sha256 _sha3 _sha512 _sitebuiltins _sre _strptime _testbuffer _testcapi _testimportmultiple
    _testinternalcapi _testmultiphase _thread _threading_local _weakrefset _winapi _xxtestfuzz abc aifc
    antigravity argparse array ast asynchat asyncio asyncore atexit audioop base64 bdb binascii binhex bisect
    builtins bz2 cProfile calendar cgi cgitb chunk cmath cmd code codecs codeop collections colorsys compileall
    concurrent configparser contextlib contextvars copy copyreg crypt csv ctypes curses dataclasses datetime dbm
    decimal difflib dis distutils doctest dummy_threading email encodings ensurepip enum errno faulthandler
    fcntl filecmp fileinput fnmatch formatter fractions ftplib functools gc genericpath getopt getpass gettext
    glob graphlib grp gzip hashlib heapq hmac html http idlelib imaplib imghdr imp importlib inspect io
    ipaddress itertools json keyword lib2to3 linecache locale logging lzma macpath mailbox mailcap marshal math
    mimetypes mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers
    opcode operator optparse os ossaudiodev parser pathlib pdb peg_parser pickle pickletools pipes pkgutil
    platform plistlib poplib posix posixpath pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data
    pyexpat queue quopri random re readline reprlib resource rlcompleter runpy sched secrets select selectors
    shelve shlex shutil signal site smtpd smtplib sndhdr socket socketserver spwd sqlite3 sre_compile
    sre_constants sre_parse ssl stat statistics string stringprep struct subprocess sunau symbol symtable sys
    sysconfig syslog tabnanny tarfile telnetlib tempfile termios test textwrap this threading time timeit
    tkinter token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo types typing unicodedata
    unittest urllib uu uuid venv warnings wave weakref webbrowser winreg winsound wsgiref xdrlib xml xmlrpc
    xxlimited xxsubtype zipapp zipfile zipimport zlib zoneinfo
"""
