"""The supervisor's children: sent to without blocking, forked without what is not theirs, measured from outside."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from executor_server.guest.supervisor import child, memory, usage
from executor_server.guest.supervisor.child import Child, ChildStuck
from executor_server.guest.supervisor.outcomes import describe_exit
from executor_server.guest.wire import link, proc
from executor_server.guest.wire.link_messages import Booted, Variable, message_of
from tests.support.descriptors import none_left_open

_NO_BACKGROUND: Any = SimpleNamespace(leaders=frozenset(), ended_cpu_s=0.0)

MAX_BYTES = 10**6


@pytest.fixture
def pair() -> Iterator[tuple[Child, socket.socket]]:
    with none_left_open():
        ours, theirs = link.make_pair()
        ours.setblocking(False)
        child = Child(-1, ours)
        yield child, theirs
        child.close()
        theirs.close()


def fill(child: Child) -> int:
    """Posts until the link is full; the last message waits."""
    count = 0
    while not child.blocked:
        child.post(Variable(name=str(count)), bytes(link.INLINE_BYTES))
        count += 1
    return count


def devnull() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def test_what_does_not_fit_waits_and_goes_out_in_order(pair: tuple[Child, socket.socket]) -> None:
    child, theirs = pair
    count = fill(child)
    child.post(Variable(name=str(count)), b"payload", fds=(devnull(),))
    child.post(Variable(name=str(count + 1)), memfd=link.sealed_memfd([b"file"]))
    taken: list[int] = []
    while len(taken) < count + 2:
        packet = link.receive(theirs, MAX_BYTES)
        taken.append(int(packet.head.text("name")))
        packet.close()
        child.flush()
    assert taken == list(range(count + 2))
    assert not child.blocked


def test_what_waits_for_a_child_that_is_closed_or_dead_is_closed(pair: tuple[Child, socket.socket]) -> None:
    child, theirs = pair
    fill(child)
    child.post(Booted(), memfd=link.sealed_memfd([b"file"]), fds=(devnull(),))
    theirs.close()
    with none_left_open():
        child.flush()
        child.post(Booted(), fds=(devnull(),))
    assert not child.blocked


def test_no_more_than_a_limit_waits(pair: tuple[Child, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    child, _ = pair
    monkeypatch.setattr("executor_server.guest.supervisor.child.MAX_WAITING", 3)
    fill(child)
    child.post(Booted())
    child.post(Booted())
    with none_left_open(), pytest.raises(ChildStuck):
        child.post(Booted(), memfd=link.sealed_memfd([b"file"]), fds=(devnull(),))


def test_what_the_host_has_no_room_for_waits_and_is_sent_later(pair: tuple[Child, socket.socket]) -> None:
    """Other sandboxes of the same user can have more descriptors in flight than this process may send."""
    child, theirs = pair
    pid = os.fork()
    if pid == 0:  # the kernel exempts root, and counts for a user
        try:
            os.setresuid(*(2_000_000_321,) * 3) if os.geteuid() == 0 else None
            ours, other = link.make_pair()
            most = devnull() + 10
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            with contextlib.suppress(OSError):
                while True:
                    socket.send_fds(ours, [b"held"], [0] * 20)
            child.post(Booted(), fds=(devnull(),))
            child.post(Variable(name="next"))
            assert child.retry_at < float("inf") and not child.blocked
            ours.close()
            other.close()
            child.flush()
            assert child.retry_at == float("inf") and not child.blocked
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    packets = [link.receive(theirs, MAX_BYTES) for _ in range(2)]
    assert [(message_of(packet), len(packet.fds)) for packet in packets] == [(Booted(), 1), (Variable(name="next"), 0)]
    for packet in packets:
        packet.close()


def test_a_message_that_waits_can_be_withdrawn(pair: tuple[Child, socket.socket]) -> None:
    child, _ = pair
    fill(child)
    assert not child.take_back(Booted)
    with none_left_open():
        child.post(Booted(), fds=(devnull(),))
        assert child.take_back(Booted)


def spawn_and_reap(target: object) -> tuple[Child, int]:
    spawned = child.spawn(target)  # type: ignore[arg-type]
    _, status = os.waitpid(spawned.pid, 0)
    return spawned, status


def test_a_child_has_its_end_of_the_link_and_no_other_descriptor_of_the_supervisor() -> None:
    read_fd, write_fd = os.pipe()

    def target(sock: socket.socket) -> None:
        link.send(sock, Booted())
        os.write(write_fd, b"never")

    child, status = spawn_and_reap(target)
    assert message_of(link.receive(child.sock, MAX_BYTES)) == Booted()
    assert describe_exit(status) == (70, None)
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    child.close()


def test_only_the_first_process_of_a_namespace_kills_everything() -> None:
    with pytest.raises(AssertionError):
        child.kill_everything()


# -- what they use


@pytest.fixture
def process() -> Iterator[usage.Process]:
    with none_left_open():
        process = usage.Process(os.getpid())
        yield process
        process.close()


def test_processor_time_of_a_process_is_its_own(process: usage.Process) -> None:
    before = time.process_time()
    measured = usage.process_cpu_s(process.pid)
    assert before <= measured <= time.process_time()


def test_processor_time_is_told_of_the_process_and_of_its_living_and_dead_children(
    process: usage.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = usage.CpuMeter(process, usage.SandboxCpu(None, _NO_BACKGROUND))
    meter.begin()
    pid = os.fork()
    if pid == 0:
        while time.process_time() < 0.1:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    monkeypatch.setattr(proc, "pids", lambda: iter((process.pid, pid)))  # no others, as in a sandbox
    assert meter.look() >= 0.09, "what a living child has spent is seen"
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    assert meter.look() >= 0.09, "and not forgotten when it ends"


def test_memory_is_measured_at_its_peak(process: usage.Process) -> None:
    block = bytearray(os.urandom(8_000_000))
    assert process.memory_bytes(b"VmHWM:") > len(block)


def test_memory_is_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent code chooses how many descriptors there are; a look at two million took the supervisor many seconds."""
    for name, value in (("_TURN_TIME_S", 0.0), ("_IN_MEMORY", ()), ("pids", lambda: iter([os.getpid()]))):
        monkeypatch.setattr(memory, name, value)
    held = [os.memfd_create("held") for _ in range(20)]
    for fd in held:
        os.truncate(fd, 1 << 20)
        os.posix_fallocate(fd, 0, 1 << 20)
    watch, calls = memory.MemoryWatch(), 1
    assert not watch.exceeds(1 << 40)
    while watch.busy:
        assert not watch.exceeds(1 << 40)
        calls += 1
    assert calls > len(held)
    assert 20 << 20 <= watch._nameless_bytes < 200 << 20
    for fd in held:
        os.close(fd)


def test_a_process_that_is_gone_uses_nothing() -> None:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        select.select([read_fd], [], [])
        os._exit(0)
    os.close(read_fd)
    process = usage.Process(pid)
    os.close(write_fd)
    os.waitpid(pid, 0)
    assert (usage.process_cpu_s(pid), process.waited_cpu_s(), process.memory_bytes(b"VmHWM:")) == (0.0, 0.0, 0)
    process.close()


@pytest.mark.parametrize("name", [b"plain", b"with ) in it", b"(((", b"a b c", b") R 1 1"])
def test_a_process_of_any_name_is_read_right(name: bytes) -> None:
    stat = b"7 (" + name + b") S 1 " + b" ".join(b"%d" % number for number in range(5, 53))
    fields = proc.fields(stat)
    assert fields[0] == b"S"
    assert fields[proc.STARTTIME] == b"22"
