"""The first process of a double's sandbox: serves requests of its server, after world.py has made a machine of it.

It speaks with the server over one socket pair: each frame is four bytes of length and a JSON object. A request has an
`id`, and its answer the same with `ok` or `error`; a command's output and its end are events with its `pid`.
One thread, nothing blocks: input that a command does not read waits here, and a command whose output the server has not
acknowledged is not read until it has.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# By where it lies: here it is in a package of another name.
from .files import Files, Refused, code_of, resolve, user_of
from .world import become_machine

FRAME_BYTES_MAX = 8 * 2**20
OUTPUT_BYTES = 32_768  # bytes of output in one event
UNACKNOWLEDGED_MAX = 64  # events of one command


@dataclass
class Command:
    pid: int
    popen: subprocess.Popen[bytes]
    outputs: dict[int, str]  # descriptor to the name of its stream
    stdin: int | None
    input: deque[tuple[int, memoryview]] = field(default_factory=deque)  # request, what is left of its data
    unacknowledged: int = 0
    code: int | None = None


class Runner:
    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self._connection = connection
        self._environment = environment
        self._selector = selectors.DefaultSelector()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._commands: dict[int, Command] = {}
        commands = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_do_")}
        files = Files()
        of_files = {name[3:]: getattr(files, name) for name in dir(files) if name.startswith("do_")}
        self._operations: dict[str, Callable[[dict[str, Any]], Any]] = {**commands, **of_files}

    def run(self) -> None:
        """Serves until the server closes the connection."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._connection.setblocking(False)
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_connection)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda _: self._on_child(wake_read))
        while True:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self._connection, wanted, self._on_connection)
            for key, events in self._selector.select():
                if key.fd in self._selector.get_map():  # not unregistered by one that came before it
                    key.data(events)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._outgoing += len(data).to_bytes(4, "big") + data

    def _on_connection(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with contextlib.suppress(BlockingIOError):
                del self._outgoing[: self._connection.send(self._outgoing)]
        if not events & selectors.EVENT_READ:
            return
        data = self._connection.recv(2**18)
        if not data:
            os._exit(0)  # pid 1: the kernel ends all the others
        self._incoming += data
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "big")
            if size > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._incoming) < 4 + size:
                return
            message = json.loads(bytes(self._incoming[4 : 4 + size]))
            del self._incoming[: 4 + size]
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = self._operations[message["op"]](message)
        except Refused as refusal:
            self._send({"id": message["id"], "error": [refusal.code, str(refusal)]})
        except OSError as error:
            self._send({"id": message["id"], "error": [code_of(error), f"{error.strerror}: {error.filename}"]})
        else:
            if answer is not None:
                self._send({"id": message["id"], "ok": answer})

    # Commands

    def _do_start(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = user_of(asked["user"])
        cwd = resolve(asked.get("cwd") or user.pw_dir, user)
        if not os.path.isdir(cwd):
            raise Refused("invalid_argument", f"cwd '{cwd}' does not exist")
        environment = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        environment = {**self._environment, **environment, **asked["envs"]}
        try:
            popen = subprocess.Popen(
                [asked["cmd"], *asked["args"]],
                stdin=subprocess.PIPE if asked["stdin"] else subprocess.DEVNULL,
                env=environment,
                cwd=cwd,
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[user.pw_gid],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=os.setpgrp,  # one thread; and process_group= is not in every Python of a machine
            )
        except OSError as error:
            raise Refused("invalid_argument", f"error starting process: {error}") from error
        assert popen.stdout is not None
        assert popen.stderr is not None
        outputs = {os.dup(popen.stdout.fileno()): "stdout", os.dup(popen.stderr.fileno()): "stderr"}
        stdin = os.dup(popen.stdin.fileno()) if popen.stdin else None
        for pipe in (popen.stdin, popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()
        command = Command(popen.pid, popen, outputs, stdin)
        self._commands[popen.pid] = command
        for fd in [*outputs, *([stdin] if stdin is not None else [])]:
            os.set_blocking(fd, False)
        self._watch(command)
        return {"pid": popen.pid}

    def _do_input(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        command = self._command(asked["pid"])
        if command.stdin is None:
            raise Refused("failed_precondition", "stdin not enabled or closed")
        data = base64.b64decode(asked["data"])
        if not data:
            return {}
        command.input.append((asked["id"], memoryview(data)))
        self._watch(command)
        return None  # answered when it is written

    def _do_signal(self, asked: dict[str, Any]) -> dict[str, Any]:
        command = self._command(asked["pid"])
        if command.code is not None:
            raise Refused("not_found", f"process with pid {asked['pid']} not found")
        os.kill(command.pid, asked["signal"])  # not reaped yet, so it can't be another's
        return {}

    def _do_ack(self, asked: dict[str, Any]) -> None:
        command = self._commands.get(asked["pid"])
        if command is not None:
            command.unacknowledged -= 1
            self._watch(command)

    def _command(self, pid: int) -> Command:
        command = self._commands.get(pid)
        if command is None:
            raise Refused("not_found", f"process with pid {pid} not found")
        return command

    def _watch(self, command: Command) -> None:
        """Makes the selector wait for what this command needs now."""
        reads = command.unacknowledged < UNACKNOWLEDGED_MAX
        wanted = dict.fromkeys(command.outputs, selectors.EVENT_READ if reads else 0)
        if command.input and command.stdin is not None:
            wanted[command.stdin] = wanted.get(command.stdin, 0) | selectors.EVENT_WRITE
        known = {*command.outputs, *([command.stdin] if command.stdin is not None else [])}
        for fd in known:
            self._unregister(fd)
            if wanted.get(fd):
                self._selector.register(fd, wanted[fd], lambda events, fd=fd: self._on_command(command, fd, events))

    def _unregister(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _on_command(self, command: Command, fd: int, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write_input(command)
        if not events & selectors.EVENT_READ or fd not in command.outputs:
            return
        try:
            data = os.read(fd, OUTPUT_BYTES)
        except BlockingIOError:
            return
        if data:
            self._send({"pid": command.pid, command.outputs[fd]: base64.b64encode(data).decode()})
            command.unacknowledged += 1
            self._watch(command)
            return
        self._unregister(fd)
        del command.outputs[fd]
        os.close(fd)
        self._finish(command)

    def _write_input(self, command: Command) -> None:
        while command.input and command.stdin is not None:
            number, data = command.input[0]
            try:
                written = os.write(command.stdin, data)
            except BlockingIOError:
                return
            except OSError as error:
                command.input.popleft()
                self._send({"id": number, "error": ["internal", f"error writing to stdin: {error.strerror}"]})
                continue
            if written < len(data):
                command.input[0] = (number, data[written:])
                continue
            command.input.popleft()
            self._send({"id": number, "ok": {}})
        self._watch(command)

    def _on_child(self, wake: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while wake.recv(4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self._commands.get(pid)  # else an orphan, which only wants to be reaped
            if command is not None:
                command.code = command.popen.returncode = os.waitstatus_to_exitcode(status)
                self._finish(command)

    def _finish(self, command: Command) -> None:
        """Reports the end when the command has ended and all its output was read: a child with its pipes delays that."""
        if command.code is None or command.outputs:
            return
        for number, _ in command.input:
            self._send({"id": number, "error": ["not_found", f"process with pid {command.pid} not found"]})
        command.input.clear()
        if command.stdin is not None:
            self._unregister(command.stdin)
            os.close(command.stdin)
        del self._commands[command.pid]
        exited = command.code >= 0
        status = f"exit status {command.code}" if exited else f"signal: {_signal_name(-command.code)}"
        end = {"exitCode": command.code if exited else -1, "exited": exited, "status": status}
        self._send({"pid": command.pid, "end": end})


def _signal_name(number: int) -> str:
    names: dict[int, str] = {signal.SIGKILL: "killed", signal.SIGTERM: "terminated", signal.SIGINT: "interrupt"}
    return names.get(number) or f"signal {number}"


def main() -> None:
    config = json.load(sys.stdin)
    become_machine(config)
    connection = socket.socket(fileno=config["socket"])
    connection.set_inheritable(False)
    runner = Runner(connection, config["environment"])
    runner._send({"ready": True})
    runner.run()
