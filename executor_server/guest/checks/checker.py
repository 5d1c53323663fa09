"""Checks a source before it runs: parses it, checks its imports, and returns instrumented code or a refusal.

The source is hostile. `check` returns a verdict for any text. If CPython's parser or compiler raises something other
than a SyntaxError, the verdict has a SyntaxError. A text that crashes or hangs them costs only this process
(checker_process.py).
"""

from __future__ import annotations

import ast
import gc
import marshal
import traceback
import warnings

from ..wire.messages import ErrorDetail
from .imports import ImportDenied, Imports
from .instrumentation import instrument, run_in_loop, spans
from .language import PolicyDenied, find_refused
from .own_modules import FoundFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Sequence

    from .control import Refusal
    from .rules import Rules
    from .sentinels import Sentinels

# Characters shown of a source line, around the error.
MAX_SOURCE_LINE_CHARS = 200
MAX_MESSAGE_CHARS = 2_000
MAX_STATEMENT_CHARS = 2_000


class Verdict:
    """Code, or an error. `code` is the marshalled `(code object, spans, names)` that the interpreter runs.

    `names` are those of `run_in_loop`.
    """

    __slots__ = ("code", "error", "imports", "outcome")

    def __init__(
        self,
        code: Optional[bytes] = None,
        outcome: str = "",
        error: Optional[ErrorDetail] = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.code = code
        self.outcome = outcome
        self.error = error
        self.imports = imports  # modules that the source imports, sorted


def check(
    source: str,
    filename: str,
    *,
    rules: Rules,
    output_mode: str,
    sentinels: Sentinels,
    directories: Sequence[str] = (),
) -> Verdict:
    """Checks a source; never raises.

    The error of a verdict has type, message, line, traceback and statement, all bounded. `directories` are searched for
    the program's own modules.
    """
    collecting = gc.isenabled()
    gc.disable()  # collecting while a large tree grows doubles the time
    try:
        return _check(source, filename, rules, output_mode, sentinels, FoundFiles(directories, source))
    finally:
        if collecting:
            gc.enable()


def _check(
    source: str, filename: str, rules: Rules, output_mode: str, sentinels: Sentinels, own: FoundFiles
) -> Verdict:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parse(source, filename, rules)
            imports = Imports(tree, rules, own)
            statements = spans(tree)
            refused = _first_refusal(imports, find_refused(tree, rules) if rules.refused else [], rules)
            if refused is not None:
                return _refused(source, filename, statements, *refused, imports.reported)
            names = run_in_loop(tree, source)
            instrument(tree, sentinels, rules=rules, output_mode=output_mode)
            code = compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True, 0)
            packed = marshal.dumps((code, statements, names))
    except SyntaxError as error:
        return _syntax_error(error, source, filename)
    except UnicodeEncodeError as error:
        line = source.count("\n", 0, error.start) + 1
        return _syntax_error(
            _plain(f"the source holds a lone surrogate: {error.reason}", filename, line), source, filename
        )
    except RecursionError:
        return _syntax_error(_plain("the source is nested too deeply", filename, 1), source, filename)
    except MemoryError:
        return _syntax_error(_plain("the source is too complex to be parsed", filename, 1), source, filename)
    except (ValueError, OverflowError) as error:
        return _syntax_error(_plain(str(error), filename, 1), source, filename)
    return Verdict(packed, imports=imports.reported)


def _parse(source: str, filename: str, rules: Rules) -> ast.Module:
    nul = source.find("\0")
    if nul >= 0:  # a ValueError without a line in some versions
        raise _plain("source code cannot contain null bytes", filename, source.count("\n", 0, nul) + 1)
    try:
        return _compiled(source, filename)
    except SyntaxError:
        from . import magics  # not at the start: most sources are Python

        installs = bool(rules.network) and rules.authorizes("subprocess")
        python, changed = magics.translate(source, filename, installs=installs)
        if not changed:
            raise
    try:
        tree = _compiled(python, filename)
    except SyntaxError as error:
        if error.lineno in changed:
            error.text, error.offset = _line_of(source, error.lineno or 1), None
        raise
    nodes: Any = ast.walk(tree)
    for node in nodes:
        if getattr(node, "lineno", 0) in changed:
            node.col_offset = node.end_col_offset = -1  # no columns: a traceback shows the line as it was written
    return tree


def _compiled(source: str, filename: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree: ast.Module = compile(source, filename, "exec", flags, True)
    return tree


def _plain(message: str, filename: str, line: int) -> SyntaxError:
    return SyntaxError(message, (filename, line, 0, None))


def _syntax_error(error: SyntaxError, source: str, filename: str) -> Verdict:
    line = error.lineno or 1
    text = _line_of(source, line)
    if error.text is None and error.offset:
        error.text = text  # the compiler, unlike the parser, has no source at hand
    _narrow(error)
    from .magics import explanation

    error.msg = (explanation(text) or error.msg or "invalid syntax")[:MAX_MESSAGE_CHARS]
    error.__cause__ = error.__context__ = None
    detail = ErrorDetail(
        type=type(error).__name__,
        message=_encodable(error.msg),
        line=line,
        traceback=_encodable("".join(traceback.format_exception_only(type(error), error))),
        statement=_encodable(text.strip()[:MAX_STATEMENT_CHARS]),
    )
    return Verdict(outcome="exception", error=detail)


def _narrow(error: SyntaxError) -> None:
    """Cuts a long source line to the part around the caret."""
    text, offset = error.text, error.offset
    if text is None or len(text) <= MAX_SOURCE_LINE_CHARS:
        return
    start = max(0, (offset or 1) - 1 - MAX_SOURCE_LINE_CHARS // 2)
    error.text = text[start : start + MAX_SOURCE_LINE_CHARS]
    if offset:
        error.offset = offset - start
    end = getattr(error, "end_offset", None)
    if end:
        error.end_offset = min(max(end - start, 1), len(error.text) + 1)  # type: ignore[attr-defined,unused-ignore]


def _first_refusal(
    imports: Imports, uses: Sequence[tuple[int, str, str]], rules: Rules
) -> Optional[tuple[int, Refusal]]:
    """Returns the first refused import or use in the source, with its line."""
    if imports.denied and not (uses and uses[0][0] < imports.denied[0][0]):
        line, module = imports.denied[0]
        return line, ImportDenied(module, rules)
    if uses:
        line, rule, what = uses[0]
        return line, PolicyDenied(rule, what)
    return None


def _refused(
    source: str,
    filename: str,
    statements: Sequence[Sequence[int]],
    line: int,
    refusal: Refusal,
    imports: Sequence[str],
) -> Verdict:
    name, message = type(refusal).__name__, str(refusal)
    text = _line_of(source, line).strip()[:MAX_SOURCE_LINE_CHARS]
    first, last = next(((span[0], span[1]) for span in statements if span[0] <= line <= span[1]), (line, line))
    detail = ErrorDetail(
        type=name,
        message=_encodable(message),
        line=line,
        traceback=_encodable(f'  File "{filename}", line {line}\n    {text}\n{name}: {message}\n'),
        statement=_encodable("\n".join(source.splitlines()[first - 1 : last])[:MAX_STATEMENT_CHARS]),
    )
    return Verdict(outcome=refusal.outcome, error=detail, imports=imports)


def _line_of(source: str, line: int) -> str:
    lines = source.split("\n", line)
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _encodable(text: str) -> str:
    """Escapes lone surrogates, which no UTF-8 text can carry."""
    return text.encode("utf-8", "backslashreplace").decode()
