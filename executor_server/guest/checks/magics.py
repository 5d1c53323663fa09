"""Translates what notebooks add to Python: magics (`%time f()`), shell commands (`!ls`) and help (`f?`).

Only a source that Python's parser refuses comes here. One pass finds its logical lines: none in Python begins with `%`
or `!`, or ends in `?`. They become calls of `get_ipython()` (interpreter/notebook.py), which are checked like all other
code, and keep their line numbers. What can't be translated stays, and `explanation` says why.
"""

from __future__ import annotations

import ast
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

# Compiled at their first use, as most sources have no such line.
_INSTALL = (
    r"\s*(?P<command>[!%]{0,2}\s*(?:(?:python[\d.]*|\{?sys\.executable\}?)\s+-m\s+)?(?:uv\s+)?(?:pip[\d.]*|conda|mamba)"
    r"\s+install)(?:\s+(?P<rest>.*))?$"
)
# A distribution with extras and bounds. Anything else on such a line is not a name, and messages do not repeat it.
_REQUIREMENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?:\[[A-Za-z0-9._,-]{1,64}\])?(?:[<>=!~]=?[A-Za-z0-9.*+]+)?"
_LINE_CHARS_MAX = 1_000
_NAMES_MAX = 8
# Options of pip whose value is the next word.
_WITH_VALUE = frozenset({"-r", "-c", "-i", "-f", "-t", "-e", "-n", "--index-url", "--extra-index-url", "--target"})

_LINE = re.compile(
    r"(?P<indent>[ \t]*)(?:"
    r"%%(?P<cell>\w+)(?P<options>.*)"
    r"|(?P<target>[^\W\d][^=\n!%?#(){}]*=[ \t]*)?(?:(?P<bang>!!?)|%(?P<magic>[^\W\d]\w*))(?P<rest>(?:.*\\\n)*.*)"
    r"|(?P<before>\?\??[ \t]*)?(?P<name>[^\W\d][\w.]*)(?P<after>(?(before)|\?\??))[ \t]*(?=\n|\Z)"
    r")"
)
_PIECE = re.compile(
    r"(?P<end>\n)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<blank>[ \t\f]+|#[^\n]*)|[^\s\\#'\"()\[\]{}]+"
    r"|(?P<quote>\"{3}|'{3}|[\"'])|\\?.",
    re.DOTALL,
)
_TIMEIT = re.compile(r"((?:\s*-[a-z]\s*\d*\b)*)\s*(.*)", re.DOTALL)

_NOTHING = ("autoreload", "config", "load_ext", "matplotlib", "reload_ext")  # figures are shown, edits are seen
_COMMANDS = ("cat", "cp", "ls", "mkdir", "mv", "pip", "rm", "rmdir", "sx", "system")
_DISPLAYS = {"html": "text/html", "latex": "text/latex", "markdown": "text/markdown", "svg": "image/svg+xml"}
_TEXTS = ("bash", "sh", "writefile", *_DISPLAYS)  # cells that are not Python
_LINES = ("cd", "env", "pwd", "set_env", "time", "timeit", *_COMMANDS, *_NOTHING)
_INSTEAD = {"capture": "leave the line out", "run": "write !python FILE, or import the module"}
_INSTEAD.update(timeit="write %timeit STATEMENT", who="print the variables", whos="print the variables")


def explanation(line: str) -> Optional[str]:
    """Returns why a line of a notebook is not understood, and what to write; None for any other line."""
    if (installs := _installation(line)) is not None:
        return installs
    found = _LINE.match(line[:_LINE_CHARS_MAX])
    name = found and (found["cell"] or found["magic"])
    if not found or not name:
        return None
    mark = "%%" if found["cell"] else "%"
    if mark == "%%" and name in (*_TEXTS, "time"):
        return f"%%{name} applies to a whole step: write it as the first line"
    if mark == "%" and name in _LINES:
        return None
    there = ", ".join(f"%{each}" for each in sorted(_LINES))
    cells = ", ".join(f"%%{each}" for each in (*_TEXTS, "time"))
    return (
        f"{mark}{name[:64]} is an IPython magic, which is not available here: "
        f"{_INSTEAD.get(name, 'write Python')}. Available: !COMMAND, {there}; for whole steps {cells}"
    )


def _installation(line: str) -> Optional[str]:
    """Returns the message for a line that is not Python because it installs packages; None for any other."""
    found = re.match(_INSTALL, line[:_LINE_CHARS_MAX])
    if found is None:
        return None
    command = " ".join(found.group("command").split())
    names = ", ".join(f'"{name}"' for name in _requirements(found.group("rest") or "")) or "..."
    return (
        f"{command!r} is not Python. Import the module: it may be installed already. "
        f"If it is not, create the session with packages=[{names}]"
    )


def _requirements(rest: str) -> list[str]:
    names = []
    words = iter(rest.partition("#")[0].split())
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif re.fullmatch(_REQUIREMENT, word.strip("'\"")):
            names.append(word.strip("'\""))
    return names[:_NAMES_MAX]


def translate(source: str, filename: str, *, installs: bool = False) -> tuple[str, set[int]]:
    """Returns the source as Python, and the numbers of the lines that it changed.

    Translates commands that install packages only with `installs`. Raises SyntaxError for an unknown cell magic.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    done: list[str] = []
    changed: set[int] = set()
    position, line, depth, begins, is_first = 0, 1, 0, True, True
    while position < len(source):
        start, found = position, _LINE.match(source, position) if begins else None
        if found is not None:
            text, cell = found.group(), found["cell"]
            position = len(source) if is_first and cell in _TEXTS else found.end()
            body = source[found.end() + 1 : position]
            code = None if cell and not is_first else _code(found, body, installs=installs)
            if code is not None:
                changed.add(line)
                text = code + "\n" * (source.count("\n", start, position) - code.count("\n"))
            elif cell:
                raise SyntaxError(str(explanation(text)), (filename, line, 1, text))
            done.append(text)
            begins = is_first = False
        else:
            found = _PIECE.match(source, position)
            assert found is not None, "a branch of the pattern takes any character"
            position = _string_end(source, found.end(), found["quote"]) if found["quote"] else found.end()
            done.append(source[start:position])
            depth = max(0, depth + bool(found["open"]) - bool(found["close"]))
            begins = bool(found["end"]) and not depth
            is_first = is_first and bool(found["end"] or found["blank"])
        line += source.count("\n", start, position)
    return "".join(done), changed


def _string_end(source: str, position: int, quote: str) -> int:
    end = quote if quote[1:] else quote + r"|(?=\n)"
    stops = re.compile(r"\\.|" + end, re.DOTALL).finditer(source, position)
    return next((stop.end() for stop in stops if stop.group()[:1] != "\\"), len(source))


def _code(found: re.Match[str], body: str, *, installs: bool) -> Optional[str]:
    """Returns the code for a line, and for the `body` of a cell below it; None if there is none."""
    if found["name"]:
        return f"{found['indent']}get_ipython().help({found['name']}, {'??' in found.group()})"
    call = _cell(found["cell"], found["options"].strip(), body) if found["cell"] else _line(found, installs)
    return call and f"{found['indent']}{found['target'] or ''}{call}"


def _cell(name: str, options: str, body: str) -> Optional[str]:
    if name == "time":
        return "get_ipython().time_step()"
    if name in ("bash", "sh"):
        return f"get_ipython().script({name!r}, {body!r}, {_text(options)})"
    if name in _DISPLAYS:
        return f"display({ ({_DISPLAYS[name]: body, 'text/plain': body})!r}, raw=True)"
    if name != "writefile":
        return None
    mode, path = ("a", options[2:]) if options.startswith("-a") else ("w", options)
    place = _text(path.strip(" \t\"'"))
    says = "print('Written:', __.name); del __"
    return f"with open({place}, {mode!r}, encoding='utf-8') as __: __.write({body!r}); {says}"


def _text(text: str) -> str:
    """Returns the code for a text that may refer to variables: {x}, $x."""
    return f"get_ipython().expanded({text!r})" if "{" in text or "$" in text else repr(text)


def _line(found: re.Match[str], installs: bool) -> Optional[str]:
    name, text = found["magic"], found["rest"].strip()
    if name == "autoreload":
        return "print('%autoreload does nothing here; use importlib.reload(MODULE) after an edit')"
    if name in _NOTHING:
        return "None"
    if name in ("cd", "env", "pwd", "set_env"):
        return _of_os(name, text.strip("\"'"))
    if name == "time":
        inner = _LINE.match(text) if text[:1] in ("!", "%") else None
        value = _line(inner, installs) if inner else _expression(text)
        return (
            f"with get_ipython().timing(): {text or 'pass'}"
            if value is None
            else f"get_ipython().timing().shown(({value}))"
        )
    if name == "timeit":
        options, statement = _TIMEIT.match(text).groups()  # type: ignore[union-attr]
        return f"for __ in get_ipython().timeit({options!r}): {statement}"
    if name and name not in _COMMANDS:
        return None
    command = text if found["bang"] or name in ("sx", "system") else f"{name} {text}"
    if not installs and _installation(f"!{command}"):
        return None
    takes = found["target"] or found["bang"] == "!!" or name == "sx"
    return f"get_ipython().{'getoutput' if takes else 'system'}({command!r})"


def _expression(text: str) -> Optional[str]:
    """Returns a text that is an expression, without its comment; None for any other."""
    try:
        tree = compile(text, "", "eval", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    except SyntaxError:
        return None
    return ast.get_source_segment(text, tree.body)


def _of_os(name: str, text: str) -> str:
    module = "get_ipython().os"
    if name == "pwd":
        return f"{module}.getcwd()"
    if name == "cd":
        return f"{module}.chdir({module}.path.expanduser({_text(text or '~')}))"
    variable, sets, value = text.partition("=" if "=" in text else " ")
    if sets:
        return f"{module}.environ.update([({variable.strip()!r}, {_text(value.strip())})])"
    return f"{module}.environ[{variable!r}]" if text else f"dict({module}.environ)"
