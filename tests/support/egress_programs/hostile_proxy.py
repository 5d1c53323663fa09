"""Speaks as the proxy's process does, and once a session's bound is set, sends whatever a test wants.

Arguments: a JSON list of lines, what to do then, and the descriptor of the link.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
import time
from typing import Any


def main(lines: list[str], then: str, link: socket.socket) -> None:
    if then == "immortal":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reader = link.makefile("rb")
    reader.readline()  # the settings
    if then.startswith("start-"):
        _fail_to_start(then.removeprefix("start-"), link)
    _send(link, {"type": "ready"})
    for line in reader:
        message = json.loads(line)
        answers = then != "mute" or message["type"] in ("bind", "secrets")
        if "number" in message and message["type"] != "ack" and answers:
            _send(link, {"type": "done", "number": message["number"]})
        if message["type"] == "allow":
            for each in lines * (1100 if then == "flood" else 1):
                link.sendall(each.encode() + b"\n")
            if then == "descriptors":
                _send_descriptors(link)
    if then == "immortal":
        time.sleep(600)


def _fail_to_start(how: str, link: socket.socket) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "crash":
        os.abort()
    if how == "close":
        link.shutdown(socket.SHUT_RDWR)
    time.sleep(600)


def _send_descriptors(link: socket.socket) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 50))]
    for _ in range(50):
        line = json.dumps({"type": "uncounted", "session": "s", "count": 1}).encode() + b"\n"
        link.sendmsg([line], rights)


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


main(json.loads(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[3])))
