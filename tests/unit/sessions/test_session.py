"""A session against a scripted guest: which frames are believed, which lose the session, and what stays right."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.channel import GuestChannel
from executor_server.core.config.state_dir import StateDir
from executor_server.core.errors import (
    ExecutorError,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
)
from executor_server.core.lifecycle.admission import AdmissionController
from executor_server.core.model import (
    BlobRef,
    Log,
    Outcome,
    OutputMode,
    Result,
    SessionFacts,
    ShippedTool,
    ToolCall,
    ToolSource,
    ToolSpec,
    VariablesState,
)
from executor_server.guest.wire.frames import CHUNK_BYTES, Frame, Kind, encode_frame
from executor_server.sessions.journal.execution import Execution
from executor_server.sessions.journal.registry import Registry, SessionRecord
from executor_server.sessions.lifetime import SessionLife
from executor_server.sessions.pool.pool import make_ready
from executor_server.sessions.session import Session
from executor_server.sessions.shared import SessionHooks, SessionSettings
from tests.support.fake_backend import SPEC, FakeBackend, FakeSandbox
from tests.support.fake_guest import TOKEN, FakeGuest
from tests.support.fake_session import OWNER, result_of, sessions_on
from tests.support.polling import eventually_async
from tests.support.specs import EXECUTION_LIMITS, session_spec

SHIPPED = ToolSpec("a", "", (), is_final_answer=False, shipped=ShippedTool(ToolSource("x = 1", "x", b"bb"), ("os",)))


class Bench:
    """A session and its scripted guest."""

    def __init__(self, session: Session, sandbox: FakeSandbox, channel: GuestChannel) -> None:
        self.session = session
        self.sandbox = sandbox
        self.channel = channel
        self.guest: FakeGuest = sandbox.guest

    async def execute(self, execution_id: str = "e", code: str = "1") -> Execution:
        return await self.session.execute(execution_id, code, OutputMode.TRAILING_EXPRESSION, EXECUTION_LIMITS)

    @property
    def heard_s(self) -> float:
        return self.channel.last_heard_s

    async def lost(self) -> bool:
        return bool(await eventually_async(lambda: self.session.state == "lost"))


@pytest.fixture
async def backend(tmp_path: Any) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def make(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[Any]:
    async with sessions_on(backend, tmp_path) as make_session:

        async def make(hooks: SessionHooks | None = None, **settings: Any) -> Bench:
            return Bench(*await make_session(hooks, SessionSettings(**settings)))

        yield make


@pytest.fixture
async def bench(make: Any) -> Bench:
    bench: Bench = await make()
    return bench


# -- the ordinary course


async def test_old_executions_are_forgotten_by_number_and_by_size(make: Any) -> None:
    bench = await make(max_finished_executions=2, journal_bytes=10_000)
    for number in range(3):
        execution = await bench.execute(f"e{number}")
        bench.guest.log(f"e{number}", "x" * 2000)
        bench.guest.end(f"e{number}")
        await execution.wait()
    with pytest.raises(NotFound) as refused:
        bench.session.execution("e0")
    assert refused.value.reason is Reason.EXECUTION_NOT_FOUND
    large = await bench.execute("large")
    bench.guest.log("large", "x" * 9000)
    bench.guest.end("large")
    await large.wait()
    await bench.execute("last")
    with pytest.raises(NotFound):
        bench.session.execution("e2")
    assert bench.session.execution("large") is large


# -- hostile guests


def frame(kind: int, head: dict[str, Any], body: bytes = b"", seq: int = 1) -> bytes:
    return encode_frame(kind, head, body, seq=seq)


LIES = {
    "garbage": b"\xff" * 100,
    "a frame of the daemon": frame(Kind.EXECUTE, {"id": "e"}),
    "a number that was skipped": frame(Kind.LOG, {"id": "e", "stream": "stdout"}, b"x", seq=7),
    "an event of another execution": frame(Kind.LOG, {"id": "other", "stream": "stdout"}, b"x"),
    "a result of another execution": frame(Kind.RESULT, {"id": "other"}),
    "a malformed event": frame(Kind.LOG, {"id": "e", "stream": "stdin"}, b"x"),
    "a malformed result": frame(Kind.RESULT, {"id": "e", "outcome": "won"}),
    "an answer without op": frame(Kind.DONE, {"ok": True}),
    "a late greeting that is malformed": frame(Kind.HELLO, {}),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_guest_that_lies_loses_the_session_with_a_reason(bench: Bench, what: str) -> None:
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.write_raw(LIES[what])
    result = await result_of(execution)
    assert (result.outcome, result.variables_state) == (Outcome.LOST, VariablesState.LOST)
    assert result.error is not None
    assert "broke the protocol" in result.error.message
    assert await eventually_async(lambda: bench.sandbox.destroyed)
    assert len(bench.guest.connections) == 1, "a guest that lied was asked again"
    with pytest.raises(PreconditionFailed) as refused:
        await bench.session.list_files("")
    assert refused.value.reason is Reason.SESSION_LOST
    assert "broke the protocol" in refused.value.message
    assert await bench.execute() is execution, "what the journal holds can still be read"


async def test_events_after_the_result_are_a_lie(bench: Bench) -> None:
    execution = await bench.execute()
    bench.guest.end("e")
    bench.guest.log("e", "late")
    assert (await result_of(execution)).outcome is Outcome.SUCCEEDED
    assert await bench.lost()


async def ask_listing(session: Session) -> None:
    await session.list_files("")


async def ask_file(session: Session) -> None:
    async for _ in session.get_file("a"):
        pass


async def ask_variables(session: Session) -> None:
    async for _ in session.get_variables(["a"]):
        pass


async def put_file(session: Session) -> None:
    await session.put_file("a", 1, pieces(b"x"))


async def register_tools(session: Session) -> None:
    await session.register_tools([SHIPPED])


async def uploaded(bench: Bench, *data: bytes) -> str:
    guest = bench.guest
    guest.on[Kind.BLOB_DATA] = lambda _: guest.write_raw(guest.window.unnumbered(Kind.ACK, {}))
    return await bench.session.upload_blob(sum(map(len, data)), pieces(*data))


def lacking(guest: FakeGuest, asked: Frame, modules: bytes) -> None:
    head = {"op": asked.head.integer("op"), "ok": False, "reason": "modules_missing", "message": "no"}
    guest.say(Kind.DONE, head, modules)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


WRONG_ANSWERS: dict[str, tuple[Any, int, Any]] = {
    "a listing that is not JSON": (ask_listing, Kind.FILE_LIST, lambda guest, asked: guest.done(asked, b"[", truncated=False)),
    "a listing without its end": (ask_listing, Kind.FILE_LIST, lambda guest, asked: guest.done(asked, b"[]")),
    "a chunk where DONE belongs": (ask_listing, Kind.FILE_LIST, lambda guest, asked: guest.say(Kind.FILE_CHUNK, {"op": asked.head.integer("op")})),
    "an answer that is not yes or no": (ask_listing, Kind.FILE_LIST, lambda guest, asked: guest.say(Kind.DONE, {"op": asked.head.integer("op")})),
    "a refusal without reason": (ask_listing, Kind.FILE_LIST, lambda guest, asked: guest.say(Kind.DONE, {"op": asked.head.integer("op"), "ok": False})),
    "a file of negative size": (ask_file, Kind.FILE_GET, lambda guest, asked: guest.say(Kind.FILE_CHUNK, {"op": asked.head.integer("op"), "file": {"path": "a", "size": -1, "directory": False, "modified": 0}})),
    "variables without names": (ask_variables, Kind.GET_VARIABLES, lambda guest, asked: guest.done(asked, b"{}")),
    "a blob without id": (ask_variables, Kind.GET_VARIABLES, lambda guest, asked: guest.say(Kind.BLOB_CHUNK, {"op": asked.head.integer("op")}, b"x")),
    "missing modules that are no list": (register_tools, Kind.REGISTER_TOOLS, lambda guest, asked: lacking(guest, asked, b"{}")),
    "missing modules that are no JSON": (register_tools, Kind.REGISTER_TOOLS, lambda guest, asked: lacking(guest, asked, b"[" * 100_000)),
    "missing modules that are no names": (register_tools, Kind.REGISTER_TOOLS, lambda guest, asked: lacking(guest, asked, b'["a b"]')),
    "too many missing modules": (register_tools, Kind.REGISTER_TOOLS, lambda guest, asked: lacking(guest, asked, json.dumps(["a"] * 33).encode())),
    "a written file without description": (put_file, Kind.FILE_DATA, lambda guest, asked: guest.done(asked)),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_ANSWERS)
async def test_a_wrong_answer_to_an_operation_loses_the_session(bench: Bench, what: str) -> None:
    """It counts as a wrong event: no failure of the daemon, and nothing more is believed."""
    ask, kind, answer = WRONG_ANSWERS[what]
    bench.guest.on[kind] = lambda asked: answer(bench.guest, asked)
    with pytest.raises(PreconditionFailed) as refused:
        await ask(bench.session)
    assert refused.value.reason is Reason.SESSION_LOST
    assert await bench.lost()
    assert await eventually_async(lambda: bench.sandbox.destroyed)


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped(bench: Bench) -> None:
    asking = asyncio.create_task(bench.session.list_files(""))
    asked = await bench.guest.got(Kind.FILE_LIST)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    bench.guest.done(asked, b"[]", truncated=False)
    execution = await bench.execute()
    bench.guest.end("e")
    assert (await result_of(execution)).outcome is Outcome.SUCCEEDED


REFUSALS = {
    "value_refused": (InvalidRequest, Reason.VALUE_REFUSED),
    "tool_refused": (InvalidRequest, Reason.TOOL_REFUSED),
    "prelude_failed": (InvalidRequest, Reason.INVALID_FIELD),
    "path_refused": (InvalidRequest, Reason.PATH_REFUSED),
    "file_not_found": (NotFound, Reason.FILE_NOT_FOUND),
    "blob_not_found": (NotFound, Reason.BLOB_NOT_FOUND),
    "too_large": (ResourceExhausted, Reason.TOO_LARGE),
}


@pytest.mark.parametrize("reason", REFUSALS)
async def test_each_refusal_of_the_guest_is_its_error(bench: Bench, reason: str) -> None:
    bench.guest.on[Kind.SET_VARIABLES] = lambda asked: bench.guest.refuse(asked, reason, "because")
    with pytest.raises(ExecutorError) as refused:
        await bench.session.set_variables([("a", b"x")])
    assert (type(refused.value), refused.value.reason, refused.value.message) == (*REFUSALS[reason], "because")
    assert bench.session.state == "idle"


# -- tools that are shipped


async def test_what_is_shipped_goes_to_the_guest_as_it_came(bench: Bench) -> None:
    blob = BlobRef(await uploaded(bench, b"xyz"), 3)
    host = ToolSpec("h", "finds", ("q",), is_final_answer=True)
    value = ToolSpec("v", "", (), is_final_answer=False, shipped=ShippedTool(blob))
    await bench.session.register_tools([SHIPPED, host, value])
    frame = await bench.guest.got(Kind.REGISTER_TOOLS)
    size = frame.head.integer("listed")
    plain = {"description": "", "parameters": [], "final": False}
    assert json.loads(frame.body[:size]) == [
        {"name": "a", **plain, "modules": ["os"], "entry": "x", "source": {"inline": 5}, "bindings": {"inline": 2}},
        {"name": "h", "description": "finds", "parameters": ["q"], "final": True},
        {"name": "v", **plain, "modules": [], "value": {"blob": blob.blob_id}},
    ]
    assert frame.body[size:] == b"x = 1bb"


async def test_admission_learns_the_bytes_of_a_shipped_tool(make: Any) -> None:
    asked: list[ToolSpec] = []

    class Listening(AdmissionController):
        async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
            asked.extend(tools)

    bench = await make(hooks=SessionHooks(admission=Listening()))
    known = BlobRef(await uploaded(bench, b"x", b"yz"), 3)
    unknown = BlobRef("of-an-earlier-daemon", 3)
    specs = [replace(SHIPPED, name=name, shipped=ShippedTool(blob)) for name, blob in (("a", known), ("b", unknown))]
    await bench.session.register_tools(specs)
    assert [tool.shipped and tool.shipped.code for tool in asked] == [
        replace(known, sha256=hashlib.sha256(b"xyz").hexdigest()),
        unknown,
    ]


# -- a guest that dies


async def test_a_sandbox_that_the_kernel_killed_for_its_memory_says_so(bench: Bench) -> None:
    execution = await bench.execute()
    bench.sandbox.kills = 1
    await bench.guest.die()
    error = (await result_of(execution)).error
    assert error is not None
    assert "memory" in error.message


async def test_a_guest_that_greets_and_hangs_up_again_and_again_is_given_up(bench: Bench) -> None:
    greet = bench.guest.take

    def greet_and_leave(connection: Any, frame: Frame) -> None:
        greet(connection, frame)
        bench.guest.hang_up()

    bench.guest.take = greet_and_leave  # type: ignore[method-assign]
    bench.guest.hang_up()
    assert await bench.lost()


async def test_a_guest_of_another_version_is_not_taken_after_a_break(bench: Bench) -> None:
    execution = await bench.execute()
    bench.guest.ready = {"protocol": 99, "python": "3.11.0", "generation": 1}
    bench.guest.hang_up()
    assert (await result_of(execution)).outcome is Outcome.LOST


async def test_a_silent_guest_is_asked_and_then_given_up(make: Any) -> None:
    bench = await make(ping_interval_s=0.0, silence_s=0.0)
    bench.session.check_guest()
    await bench.guest.got(Kind.PING)
    assert bench.session.state == "idle", "it was not asked before it was given up"
    bench.guest.on[Kind.PING] = lambda _: None
    assert await eventually_async(lambda: bench.session.check_guest() or bench.session.state == "lost")
    execution_refused = pytest.raises(PreconditionFailed, match="has not answered")
    with execution_refused:
        await bench.execute()


async def test_a_guest_that_answers_is_not_given_up(make: Any) -> None:
    bench = await make(ping_interval_s=0.0, silence_s=30.0)
    for count in range(1, 6):
        before_s = bench.heard_s
        bench.session.check_guest()
        await bench.guest.got(Kind.PING, count)
        assert await eventually_async(lambda before_s=before_s: bench.heard_s > before_s)  # type: ignore[misc]
    assert bench.session.state == "idle"


async def test_a_session_at_rest_has_nothing_to_do_until_its_ping_is_due_or_it_is_used(make: Any) -> None:
    bench = await make(ping_interval_s=100.0)
    bench.session.life = SessionLife(time.time(), time.time())
    bench.session.touch = bench.session.life.touch
    bench.session.look()
    assert bench.session.life.look_at_s == bench.heard_s + 100.0
    execution = await bench.execute()
    assert bench.session.life.look_at_s == 0.0
    bench.session.look()
    assert bench.session.life.look_at_s == 0.0, "what runs postpones its end with each look"
    bench.session.give_up("it is over")
    await result_of(execution)


# -- kills for memory


@pytest.mark.parametrize(
    ("kills", "outcome"), [(1, Outcome.OUT_OF_MEMORY), (0, Outcome.CRASHED), (None, Outcome.CRASHED)]
)
async def test_only_the_kernel_says_that_memory_was_the_cause(
    bench: Bench, kills: int | None, outcome: Outcome
) -> None:
    execution = await bench.execute()
    bench.sandbox.kills = kills
    bench.guest.end("e", outcome="crashed", variables="reset", generation=2, oom_suspect=True)
    result = await result_of(execution)
    assert (result.outcome, result.generation, result.variables_state) == (outcome, 2, VariablesState.RESET)


# -- back-pressure


async def test_a_full_journal_stops_the_guest_also_over_a_broken_channel(make: Any) -> None:
    bench = await make(journal_bytes=4 * CHUNK_BYTES)
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    total = 64
    for _ in range(total):
        bench.guest.log("e", "x" * CHUNK_BYTES)
    assert await eventually_async(lambda: execution.journal_size > 4 * CHUNK_BYTES)
    bench.guest.hang_up()
    for number in range(100):  # the daemon notices when it writes
        if len(bench.guest.connections) > 1:
            break
        bench.channel.ping()
        await asyncio.sleep(0)
        assert number < 99
    await bench.guest.got(Kind.HELLO, 2)
    await asking_for_a_while(bench)
    assert execution.journal_size < 16 * CHUNK_BYTES
    bench.guest.end("e")
    logs = [event async for event in execution.events() if isinstance(event.kind, Log)]
    assert len(logs) == total


async def asking_for_a_while(bench: Bench) -> None:
    """Runs the event loop often enough to read all that the sockets hold, if they are read at all."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_what_nobody_takes_of_a_file_stays_with_the_guest(bench: Bench) -> None:
    total = 64

    def send_all(asked: Frame) -> None:
        op = asked.head.integer("op")
        info = {"path": "a", "size": total * CHUNK_BYTES, "directory": False, "modified": 0}
        bench.guest.say(Kind.FILE_CHUNK, {"op": op, "file": info})
        for _ in range(total):
            bench.guest.say(Kind.FILE_CHUNK, {"op": op}, bytes(CHUNK_BYTES))
        bench.guest.done(asked)

    bench.guest.on[Kind.FILE_GET] = send_all
    async with aclosing(bench.session.get_file("a")) as parts:
        await anext(parts)
        await asking_for_a_while(bench)
        transport = bench.guest.connections[-1].transport
        assert transport is not None
        assert transport.get_write_buffer_size() > total * CHUNK_BYTES // 2, "the daemon took it all"
        taken = [len(part) async for part in parts if isinstance(part, bytes)]
    assert sum(taken) == total * CHUNK_BYTES


async def test_a_reader_of_a_file_that_leaves_does_not_hold_the_session_up(bench: Bench) -> None:
    def send_much(asked: Frame) -> None:
        info = {"path": "a", "size": 2**30, "directory": False, "modified": 0}
        bench.guest.say(Kind.FILE_CHUNK, {"op": asked.head.integer("op"), "file": info})
        for _ in range(64):
            bench.guest.say(Kind.FILE_CHUNK, {"op": asked.head.integer("op")}, bytes(CHUNK_BYTES))

    bench.guest.on[Kind.FILE_GET] = send_much
    async with aclosing(bench.session.get_file("a")) as parts:
        await anext(parts)
        await asking_for_a_while(bench)
    execution = await bench.execute()
    bench.guest.end("e")
    assert (await result_of(execution)).outcome is Outcome.SUCCEEDED


async def test_requests_that_the_guest_does_not_take_are_bounded(bench: Bench) -> None:
    """A client that leaves frees its place among the open requests, but not the memory of its frame."""
    bench.guest.freeze()
    sent = 0

    async def large_requests() -> None:
        nonlocal sent
        while True:
            leaving = asyncio.create_task(bench.session.set_variables([("x", bytes(3_800_000))]))
            await asyncio.wait({leaving}, timeout=0)
            leaving.cancel()
            await asyncio.wait({leaving})
            if not leaving.cancelled():
                leaving.result()
            sent += 1
            assert sent < 32

    with pytest.raises(ResourceExhausted) as refused:
        await large_requests()
    assert (refused.value.reason, refused.value.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    for other in (
        bench.session.register_tools([SHIPPED]),
        bench.session.authorize_imports(["math"], lambda spec: spec),
        bench.session.manage_file("stat", "a"),
    ):
        with pytest.raises(ResourceExhausted):
            await other
    policy = asyncio.ensure_future(bench.session.hold_to(bench.session.spec))
    bench.guest.thaw()
    await policy
    await bench.session.set_variables([("x", b"1")])
    assert len(bench.guest.of_kind(Kind.RESTRICT)) == 1


async def test_an_upload_that_waits_for_the_guest_does_not_block_requests(bench: Bench) -> None:
    bench.guest.freeze()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * CHUNK_BYTES

    uploads = [asyncio.create_task(bench.session.put_file("a", 2**29, endless())) for _ in range(31)]
    await asking_for_a_while(bench)
    setting = asyncio.create_task(bench.session.set_variables([("x", b"1")]))
    await asking_for_a_while(bench)
    assert not setting.done()
    bench.guest.thaw()
    await setting
    for upload in uploads:
        upload.cancel()
    await asyncio.gather(*uploads, return_exceptions=True)


# -- uploads


async def test_a_refused_file_is_not_sent_to_its_end(bench: Bench) -> None:
    bench.guest.on[Kind.FILE_PUT] = lambda asked: bench.guest.refuse(asked, "path_refused")
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * CHUNK_BYTES
            await asyncio.sleep(0)

    with pytest.raises(InvalidRequest):
        await bench.session.put_file("a", 2**29, endless())
    assert sent < 2000


async def test_sizes_over_the_limits_are_refused_before_anything_is_sent(make: Any) -> None:
    bench = await make(staging_bytes=10, max_file_bytes=10)
    for upload in (bench.session.upload_blob(11, pieces()), bench.session.put_file("a", 11, pieces())):
        with pytest.raises(ResourceExhausted) as refused:
            await upload
        assert refused.value.reason is Reason.TOO_LARGE
    assert [frame.kind for frame in bench.guest.received] == [Kind.HELLO]


# -- the end


async def test_a_tool_call_that_the_end_overtook_is_not_answered(bench: Bench) -> None:
    execution = await bench.execute()
    bench.guest.say(Kind.TOOL_CALL, {"id": "e", "call": "c1", "name": "f"}, b"")
    bench.guest.end("e", outcome="cancelled")
    await execution.wait()
    assert [type(event.kind) async for event in execution.events()] == [ToolCall, Result]
    with pytest.raises(PreconditionFailed) as refused:
        await bench.session.submit_tool_result(execution.execution_id, "c1", b"")
    assert refused.value.reason is Reason.EXECUTION_ENDED


async def test_a_guest_that_hangs_up_right_after_its_answer_is_noticed(backend: FakeBackend, tmp_path: Path) -> None:
    """Between the first answer and the session the channel has no listener: requests made then never ended."""
    ready = await make_ready(backend, SPEC, warm=False)
    await backend.made[-1].guest.die()
    assert await eventually_async(lambda: not ready.channel.connected)
    spec = session_spec(SPEC, imports=("math",))
    name = ready.sandbox.sandbox_id
    record = SessionRecord("s", OWNER, "r", spec, "fake", name, TOKEN, "3.11.0", False, time.time(), 1)
    registry = Registry(StateDir(tmp_path))
    session = Session(record, ready.sandbox, ready.channel, registry, SessionSettings())
    session.begin()
    async with asyncio.timeout(10):
        with pytest.raises(PreconditionFailed) as refused:
            await session.configure({})
    assert refused.value.reason is Reason.SESSION_LOST
    await session.close("the test is over")
    await session.destroy()
    registry.close()


async def test_a_task_that_breaks_loses_the_session_and_leaves_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> int:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(bench.sandbox, "oom_kills", broken)
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.end("e", outcome="crashed", oom_suspect=True)
    async with asyncio.timeout(10):
        assert (await result_of(execution)).outcome is Outcome.CRASHED, "what is known of it"
    assert bench.session.lost_reason == "an internal error of the daemon"
