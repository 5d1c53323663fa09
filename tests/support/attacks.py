"""The common beginning of attacking programs: agent code that has taken over its own interpreter."""

from __future__ import annotations

LINK = '''
import array, fcntl, json, os, socket, time

def find_link():
    """Returns the interpreter's end of its link to the supervisor, found by its type."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if found.type == socket.SOCK_SEQPACKET:
            return found
        found.close()

link = find_link()

def say(head, body=b"", fds=()):
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([len(head).to_bytes(4, "big"), head, body], rights)

def memory_file(data=b"", sealed=True):
    fd = os.memfd_create("payload", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if sealed:
        fcntl.fcntl(fd, 1033, 15)
    return fd

def done(outcome="succeeded", error=b"", **more):
    name = next(reversed([file for file in __import__("linecache").cache if file.startswith("<execution-")]))
    head = {"t": "done", "filename": name, "outcome": outcome, "operations": 0, "error": len(error), **more}
    say(head, error)
'''
"""Names for programs that speak to the supervisor as if they were the interpreter."""

WAIT = "\ntime.sleep(1e6)"

LEADER_ONLY = """
import os
me, others = os.getpid(), []
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (1, me):
        others.append(int(name))
"""
"""`others`: what runs in the sandbox beside the supervisor and this program, which is the checker."""

KILL_COPIES = """
import os, signal
for name in os.listdir('/proc'):
    if name.isdigit() and int(name) not in (1, os.getpid()):
        try: stat = open(f'/proc/{name}/stat').read().rpartition(')')[2].split()
        except OSError: continue
        if int(stat[1]) == 1 and int(stat[3]) == int(name): os.kill(int(name), signal.SIGKILL)
"""
"""Kills the other copies of the interpreter: children of process 1 that lead a session of their own."""
