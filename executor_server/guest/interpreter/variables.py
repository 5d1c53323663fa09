"""The supervisor's requests on variables: set some, get some, export and restore them all."""

from __future__ import annotations

import mmap
import os
import types

from executor_api.limits import VARIABLES_BYTES_MAX, VARIABLES_MAX, VARIABLES_NAMED_MAX
from executor_api.values import EncodeError

from ..checks.failures import text_of
from ..wire import link
from ..wire.lean import dumps, signal
from ..wire.link_messages import (
    MAX_ANSWER_CHARS,
    Answered,
    CommitVariables,
    ExportedState,
    ExportState,
    ForgetVariables,
    GetVariables,
    RestoreState,
    Variable,
)
from ..wire.messages import MAX_NAME_CHARS
from ..wire.schema import read_texts
from .encoding import decode_value, encode_description, encode_in_parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Callable, Union

    from executor_api.values.packing import Parts

    from .own_process import OwnProcess
    from .runtime import Runtime
    from .streams import Streams

    Send = Callable[..., None]


# All pages in one system call, instead of one fault for every few; mmap.MAP_POPULATE is new in Python 3.10.
_MAPPED_AT_ONCE = mmap.MAP_SHARED | 0x8000


class Variables:
    """Sets and gets variables of `__main__`. New values arrive one by one and are all set at the commit."""

    def __init__(self, runtime: Runtime, send: Send) -> None:
        self._guarded = runtime.guarded
        self._namespace = runtime.main.__dict__
        self._send = send
        # Captured: agent code may replace the names in their module.
        self._encode, self._describe = encode_in_parts, encode_description
        self._staged: dict[str, Any] = {}
        self._staging_error = ""

    def on_variable(self, variable: Variable, packet: link.Packet) -> None:
        name = variable.name
        try:
            self._staged[name] = self._guarded(decode_value, view(packet))
        except BaseException as error:  # noqa: BLE001 (the border of agent code: unpickling runs what it wants)
            self._staging_error = self._staging_error or f"variable {name}: {text_of(error)}"

    def on_commit(self, _message: CommitVariables, _packet: link.Packet) -> None:
        staged, failed = self._staged, self._staging_error
        self._staged, self._staging_error = {}, ""
        if not failed:
            self._namespace.update(staged)
        self._send(Answered(ok=not failed, message=failed[:MAX_ANSWER_CHARS]))

    def on_forget(self, _message: ForgetVariables, _packet: link.Packet) -> None:
        self._staged, self._staging_error = {}, ""

    def on_get(self, _message: GetVariables, packet: link.Packet) -> None:
        namespace = self._namespace
        names = read_texts(link.read_body(packet), VARIABLES_NAMED_MAX, MAX_NAME_CHARS, "names") or [
            name for name, value in list(namespace.items()) if _is_variable(name, value)
        ]
        if len(names) > VARIABLES_MAX:
            message = f"there are {len(names)} variables; at most {VARIABLES_MAX} can be fetched at once"
            self._send(Answered(ok=False, message=message))
            return
        left_bytes = VARIABLES_BYTES_MAX
        try:
            for name in names:
                if name in namespace:
                    packed = self._packed(namespace[name])
                    left_bytes -= link.size_of(packed)
                    if left_bytes < 0:
                        why = f"variables fetched together may have at most {VARIABLES_BYTES_MAX} bytes; name fewer"
                        raise EncodeError(why)
                    self._send(Variable(name=name), packed)
        except BaseException as error:  # noqa: BLE001 (the border of agent code: its __repr__ runs here)
            message = f"variable {name}: {text_of(error)}"
            self._send(Answered(ok=False, message=message[:MAX_ANSWER_CHARS]))
            return
        missing = [name for name in names if name not in namespace]
        self._send(Answered(ok=True), dumps(missing))

    def _packed(self, value: Any) -> Parts:
        """Returns a variable, or an opaque value if its own code raises, so that the others are not lost."""
        try:
            return self._guarded(self._encode, value)  # type: ignore[no-any-return]
        except EncodeError:
            raise  # too large, which is the answer to the request
        except BaseException as error:  # noqa: BLE001 (the border of agent code: its __repr__ runs here)
            return self._describe(value, error, shown=False)


class States:
    """Exports all variables as a state, and restores one."""

    def __init__(
        self, runtime: Runtime, streams: Streams, process: OwnProcess, sock: socket.socket, send: Send
    ) -> None:
        self._runtime = runtime
        self._streams = streams
        self._process = process
        self._sock = sock
        self._send = send

    def on_export(self, request: ExportState, _packet: link.Packet) -> None:
        from ..state.export import export

        runtime = self._runtime
        try:
            memfd, manifest = runtime.guarded(
                export, runtime.world(), request.max_bytes, runtime.audit.off, _settle_copy
            )
        except BaseException as error:  # noqa: BLE001 (the border of agent code: it can have changed what is used here)
            self._send(Answered(ok=False, message=text_of(error)[:MAX_ANSWER_CHARS]))
            return
        try:
            link.forward(self._sock, ExportedState(), memfd)
        finally:
            os.close(memfd)
        self._send(Answered(ok=True), dumps(manifest))

    def on_restore(self, _message: RestoreState, packet: link.Packet) -> None:
        from ..state.restore import restore

        memfd = packet.memfd
        assert memfd is not None, "a state comes as a memory file"
        try:
            manifest = restore(self._runtime.world(), memfd, packet.size, self._runtime.guarded)
        except BaseException as error:  # noqa: BLE001 (the border of agent code: unpickling runs what it wants)
            answer, body = Answered(ok=False, message=text_of(error)[:MAX_ANSWER_CHARS]), b""
        else:
            answer, body = Answered(ok=True), dumps(manifest)
        self._process.end_forks()
        self._streams.settle()  # output of unpickling belongs to no program
        self._send(answer, body)


def _settle_copy() -> None:
    """Makes the pickling copy of the process end at an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def view(packet: link.Packet) -> Union[bytes, memoryview]:
    """Returns the body without copying it: decoding a large value copies it once anyway."""
    if packet.memfd is None:
        return packet.body
    try:
        if not packet.size:
            return b""  # an empty file can't be mapped
        return memoryview(mmap.mmap(packet.memfd, packet.size, _MAPPED_AT_ONCE, mmap.PROT_READ))
    finally:
        os.close(packet.memfd)


def _is_variable(name: object, value: Any) -> bool:
    skipped = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    # Agent code can put anything among its globals, even under keys that are not names. isinstance would ask it.
    return (
        type(name) is str and len(name) <= MAX_NAME_CHARS and name[:1] != "_" and not issubclass(type(value), skipped)
    )
