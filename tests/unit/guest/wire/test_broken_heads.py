"""Heads that agent code breaks, on the link to a supervisor: whatever the interpreter lacks, FrameError is the answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

# Runs where `json` was never imported, as in a supervisor: CPython's scanner takes its exception from there.
FUZZ = """
import random, sys
from executor_server.guest.wire import link, link_messages
from executor_server.guest.wire.frames import FrameError

assert "json.decoder" not in sys.modules
exec(sys.argv[1])
chance = random.Random(31)
ours, theirs = link.make_pair()
whole = (b'{"t":"done","filename":"f","outcome":"exited","operations":1,"error":0,"unfit":""}', b'{"a":[1.5e3,null,-0]}')
heads = [head[:end] for head in whole for end in range(len(head) + 1)]
heads += [b"[" * 60000, b'{"a":' * 12000, b"9" * 60000, b'{"t":"\\xff"}', b'{"t":NaN}', b'{"t":1e999}', b'"\\\\ud800"', b"{}{}"]
for _ in range(3000):
    head = bytearray(chance.choice(whole))
    for _ in range(chance.randrange(1, 4)):
        head[chance.randrange(len(head))] = chance.choice(b'{}[]",:\\\\0-eEtnNI\\xff ')
    heads.append(bytes(head))
refused = 0
for head in heads:
    theirs.send(len(head).to_bytes(4, "big") + head)
    try:
        link_messages.message_of(link.receive(ours, 1000))
    except FrameError:
        refused += 1
print(refused > len(heads) // 2)
"""


@pytest.mark.parametrize(
    "broken", ["", "sys.modules['json.decoder'] = None", "import json.decoder; del json.decoder.JSONDecodeError"]
)
def test_a_broken_head_is_refused_whatever_the_interpreter_lacks(broken: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "proto")))}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", FUZZ, broken], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == ("True\n", "")
