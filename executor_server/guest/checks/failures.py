"""Describes an exception of the program for the caller: bounded, with the program's own lines and none of ours."""

from __future__ import annotations

import traceback

from ..wire.messages import ErrorDetail
from . import offline
from .control import ExecutionInterrupted

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any, Callable, Optional, Sequence

MAX_MESSAGE_CHARS = 8_000
_MAX_TRACEBACK_CHARS = 12_000
_MAX_STATEMENT_CHARS = 2_000
_MAX_FRAMES = 30
_MAX_CAPTURED_FRAMES = 200
_MAX_CHAIN = 64
_AGENTS = ("<execution-", "<prelude>", "<tool-")
_NOT_SHOWN = (__file__.partition("executor_guest")[0], "<frozen importlib")  # as CPython itself drops the latter


def describe(
    error: BaseException,
    filename: str,
    source: str,
    spans: list[list[int]],
    network: Sequence[str] = (),
    owns: Callable[[str], bool] = lambda path: False,
) -> ErrorDetail:
    """Returns the type, message, traceback, line and statement of an exception, from the program's own frames.

    `network` names the hosts that the program may reach; `owns` is true for the files of its own modules.
    """
    trace = _agent_traceback(error)
    line, top_line = _lines(trace, filename)
    name = "KeyboardInterrupt" if issubclass(type(error), ExecutionInterrupted) else type(error).__name__
    note = f"\n{offline.note(network)}" if _is(offline.is_offline, error) else ""
    if _is(offline.is_install, error):
        note = f"{note}\n{offline.NOT_INSTALLED}"
    elif not network and (package := _is(offline.missing_package, error)):
        note = f"{note}\n{offline.MISSING.format(name=package)}"
    return ErrorDetail(
        type=str.__str__(name)[:256],
        message=text_of(error) + note,
        traceback=_format(error, trace, owns, note),
        line=line,
        statement=_statement(source, spans, top_line),
    )


def text_of(error: BaseException) -> str:
    """Returns the message of an exception, bounded."""
    try:
        text = str.__str__(str(error))  # not of a class of the program's own
    except BaseException as inner:  # noqa: BLE001 (the program's own __str__)
        text = f"<its __str__ raised {type(inner).__name__}>"
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"


def _agent_traceback(error: BaseException) -> Optional[types.TracebackType]:
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_AGENTS):
        trace = trace.tb_next
    return trace


def _lines(trace: Optional[types.TracebackType], filename: str) -> tuple[int, int]:
    """Returns the (innermost, outermost) line of the execution's own source."""
    innermost = outermost = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == filename:
            innermost = trace.tb_lineno
            outermost = outermost or trace.tb_lineno
        trace = trace.tb_next
    return innermost, outermost


def _is(kind: Callable[[BaseException], Any], error: BaseException) -> Any:
    try:
        return kind(error)
    except BaseException:  # noqa: BLE001 (a class of the program's own may have odd attributes)
        return False


def _format(error: BaseException, trace: Optional[types.TracebackType], owns: Callable[[str], bool], note: str) -> str:
    try:
        captured = traceback.TracebackException(type(error), error, trace, limit=-_MAX_CAPTURED_FRAMES)
        _fold(captured, owns)
        text = "".join(captured.format())
        text = f"{text.rstrip()}{note}\n" if note else text
    except BaseException as inner:  # noqa: BLE001 (the program's own __str__, or out of memory)
        return f"{type(error).__name__}: <the traceback cannot be shown: {type(inner).__name__}>"
    if len(text) <= _MAX_TRACEBACK_CHARS:
        return text
    half = _MAX_TRACEBACK_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _fold(captured: traceback.TracebackException, owns: Callable[[str], bool]) -> None:
    """Keeps the program's own frames and the innermost one of each exception. Drops exceptions of libraries that repeat
    a message: a missing key in pandas is two exceptions in 25 lines, a failed connection five in sixty."""
    pending = [captured]
    for _ in range(_MAX_CHAIN):
        if not pending:
            return
        one = pending.pop()
        one.stack[:] = _folded(one.stack, owns)
        inner, said = _inner(one), _said(one)
        for _ in range(_MAX_CHAIN):
            if inner is None or _said(inner) not in said or any(_is_own(frame, owns) for frame in inner.stack):
                break
            inner = _inner(inner)
        if one.__cause__ is not None:
            one.__cause__ = inner
        else:
            one.__context__ = inner
        pending += [inner] if inner is not None else []
        pending += getattr(one, "exceptions", None) or ()  # those of a group


def _folded(stack: list[traceback.FrameSummary], owns: Callable[[str], bool]) -> list[traceback.FrameSummary]:
    # Without the frames of the guest, the interrupt, the tools and the wrapped builtins, and those of the importer.
    frames = [frame for frame in stack if not frame.filename.startswith(_NOT_SHOWN)]
    kept = [frame for frame in frames[:-1] if _is_own(frame, owns)] + frames[-1:]
    if folded := len(frames) - len(kept):
        last = kept[-1]
        note = f"{last.name} (frames of libraries not shown: {folded})"
        kept[-1] = traceback.FrameSummary(last.filename, last.lineno or 0, note, line=last.line)
    return kept[-_MAX_FRAMES:]


def _said(one: traceback.TracebackException) -> str:
    """Returns the message of an exception, without its type."""
    return "".join(one.format_exception_only()).strip().partition(": ")[2]


def _inner(one: traceback.TracebackException) -> Optional[traceback.TracebackException]:
    return one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _is_own(frame: traceback.FrameSummary, owns: Callable[[str], bool]) -> bool:
    name = frame.filename
    return name.startswith(_AGENTS) or (name.startswith("/") and owns(name))


def _statement(source: str, spans: list[list[int]], line: int) -> str:
    for first, last in spans:
        if first <= line <= last:
            return "\n".join(source.splitlines()[first - 1 : last])[:_MAX_STATEMENT_CHARS]
    return ""
