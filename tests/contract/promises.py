"""The promises of a backend, in words. Each test of the contract names those that it proves; docs/backends.md lists them.

A backend keeps every promise that does not name it under `otherwise`. For a promise that it keeps by other means, or
not at all, that names the means and the reason, and a test proves the behaviour in its place (`instead` in marks.py).

A program sees the guest, which is the same in every sandbox. When a promise is about nothing else and proving it takes
long, `proved_on` names the backends that its tests run on; it holds on the others too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BACKENDS = ("local", "docker", "e2b")


class Keeping(enum.Enum):
    """The means by which a backend keeps a promise."""

    KEPT = "kept"
    BY_SUPERVISOR = "kept by the supervisor"  # inside of the sandbox, where the backend has no means outside of it
    NOT_KEPT = "not kept"


@dataclass(frozen=True)
class Otherwise:
    """The exceptional way in which a backend keeps a promise; `why` is a sentence for people."""

    keeping: Keeping
    why: str


@dataclass(frozen=True)
class Promise:
    """One sentence that holds for every backend, except those under `otherwise`."""

    promise_id: str
    topic: str
    sentence: str
    otherwise: Mapping[str, Otherwise] = field(default_factory=dict)
    proved_on: tuple[str, ...] = BACKENDS

    def keeping(self, backend: str) -> Keeping:
        return self.otherwise[backend].keeping if backend in self.otherwise else Keeping.KEPT

    def is_proved_on(self, backend: str) -> bool:
        return backend in self.proved_on and self.keeping(backend) is not Keeping.NOT_KEPT


def _not(why: str) -> Otherwise:
    return Otherwise(Keeping.NOT_KEPT, why)


def _by_supervisor(why: str) -> Otherwise:
    return Otherwise(Keeping.BY_SUPERVISOR, why)


_HOST_MEMORY = _by_supervisor(
    "E2B limits the whole virtual machine; within it, the supervisor watches what the sandbox's processes hold."
)
_HOST_PROCESSES = _by_supervisor("Nothing outside limits them; the supervisor sets the limit for the sandbox's user.")
_HOST_DISK = _by_supervisor("The guest mounts memory of this size for all that is writable.")
_HOST_CUT = _by_supervisor("The guest makes a network namespace of its own, with nothing in it but itself.")
_NO_EGRESS = _not("A proxy beside the sandbox serves its listener, in the machine: e2b.md says how.")
_NO_BUILD_SANDBOX = _not("Its environments are made on the daemon's host, and travel to its machines as archives.")
_CGROUP = Otherwise(Keeping.KEPT, "By a control group; on a host that lets us have none, by the supervisor.")
_NOT_IN_THE_CLOUD = ("local", "docker")
_SAME_GUEST = ("local",)
_TWO_GUESTS = ("local", "docker")

PROMISES = (
    # -- Creation
    Promise("create-ready", "Creation", "A sandbox is handed out when its guest can be reached, and not before."),
    Promise(
        "create-apart",
        "Creation",
        "Sandboxes share nothing: no variable, file, memory or process of one is seen in another.",
    ),
    Promise(
        "create-spec",
        "Creation",
        "A sandbox is as its spec says: this memory, so many processes, disk of this size.",
        {
            "e2b": _by_supervisor("The guest sets the limits; the machine's own size is the template's."),
        },
    ),
    Promise(
        "create-no-network",
        "Creation",
        "A program reaches nothing outside of its sandbox: there is no network but its own loopback.",
        {"e2b": _HOST_CUT},
    ),
    Promise(
        "egress-listener",
        "Network",
        "A sandbox with a network has one way out: a listener of its own, which it hands to the daemon and to no program.",
        {"e2b": _NO_EGRESS},
    ),
    Promise(
        "egress-variables",
        "Network",
        "Programs find the proxy and the certificate authorities by variables; without a network there are none of these.",
        {"e2b": _NO_EGRESS},
    ),
    Promise(
        "egress-restart",
        "Network",
        "The next daemon gets the listener again; connections that programs begin meanwhile wait for it.",
        {"e2b": _NO_EGRESS},
    ),
    Promise(
        "create-image-unknown", "Creation", "An image that no configuration names is refused; nothing is left of it."
    ),
    Promise(
        "create-image-missing",
        "Creation",
        "An image that is not there, or has no Python that serves, is reported as such, in words that may go to the client.",
    ),
    Promise(
        "machine",
        "Creation",
        "A program finds a small machine: USER and the host name are set, the system has a name in /etc/os-release, /var/tmp is writable, and /workspace is the user's own.",
    ),
    Promise("create-cancelled", "Creation", "A creation that is cancelled, whenever, leaves nothing."),
    Promise("create-concurrent", "Creation", "Many can be made at a time; each is whole."),
    Promise(
        "create-full",
        "Creation",
        "A backend that has as many sandboxes as it may have says so, and when to ask again.",
        {
            "local": _not(
                "It has no number of its own: `sessions.max_sessions` and quotas are the limit. It makes more."
            ),
            "docker": _not(
                "It has no number of its own: `sessions.max_sessions` and quotas are the limit. It makes more."
            ),
        },
    ),
    Promise(
        "create-down", "Creation", "A backend whose host or cloud can't serve does not start, and says what is missing."
    ),
    Promise(
        "fingerprint",
        "Creation",
        "A sandbox carries the fingerprint of all that it is made of; another spec or another policy has another one.",
    ),
    Promise(
        "label",
        "Creation",
        "A sandbox can be given its owner, or its part of the processors, at any time; that never fails.",
    ),
    # -- Packages
    Promise(
        "packages",
        "Packages",
        "A sandbox with packages has them ahead of the image's own: modules, programs, metadata.",
    ),
    Promise(
        "packages-inside",
        "Packages",
        "Code of an environment runs in the sandbox alone; no program can change an environment or see another.",
    ),
    Promise(
        "packages-held",
        "Packages",
        "An environment is held before its sandbox is made, and until nothing of that is left, also over a restart.",
    ),
    Promise(
        "packages-build-sandbox",
        "Packages",
        "Environments are made and tried in sandboxes of the daemon's own, whose files have one owner.",
        {"e2b": _NO_BUILD_SANDBOX},
    ),
    # -- Running code
    Promise(
        "run-value", "Running code", "The value of the last expression, or statement, is the output, large or small."
    ),
    Promise("run-state", "Running code", "Variables live from one execution to the next, also past an exception."),
    Promise("run-error", "Running code", "An error shows the program's own lines, and nothing of ours."),
    Promise("run-await", "Running code", "Code awaits at its top level."),
    Promise(
        "run-value-large",
        "Running code",
        "A value that is large, or whose own code fails, is described in the output, and never fails its step.",
        proved_on=_TWO_GUESTS,
    ),
    Promise(
        "run-processes",
        "Running code",
        "Programs start processes with the functions that they define, by each start method of `multiprocessing`.",
        proved_on=_TWO_GUESTS,
    ),
    Promise("run-main", "Running code", "Programs run in a real `__main__`: its classes pickle."),
    Promise("run-operations", "Running code", "Operations are counted, and the same program spends the same count."),
    Promise(
        "run-once", "Running code", "An id names one execution, which runs once; a caller that asks again reads along."
    ),
    Promise("run-queue", "Running code", "Executions of one session run one after the other; too many are refused."),
    Promise("run-prelude", "Running code", "The prelude runs first, in every interpreter; its failure is reported."),
    Promise(
        "run-prelude-deadly",
        "Running code",
        "A prelude that ends each interpreter is left out, and that is reported.",
    ),
    Promise(
        "run-variables", "Running code", "Variables are set and read between executions, all or none, of any size."
    ),
    Promise(
        "run-variables-hostile",
        "Running code",
        "A value that kills its decoder costs its interpreter, not the session; a repr that lies is only text.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise(
        "run-no-network",
        "Running code",
        "A program that misses the network, or a child of it, reads that the sandbox has none, once for an execution.",
    ),
    Promise("run-blobs", "Running code", "A large value travels apart and whole, and can be named once."),
    # -- Streaming
    Promise(
        "stream-order", "Streaming", "Events are numbered without gaps, in order, as they happen; the result is last."
    ),
    Promise("stream-again", "Streaming", "Who comes back reads on from where he was."),
    Promise("stream-cut", "Streaming", "Output past its limit keeps head and tail, and says how much is missing."),
    Promise("stream-text", "Streaming", "A character that is cut between two writes arrives whole."),
    Promise(
        "stream-children",
        "Streaming",
        "What child processes and C code print is output too.",
    ),
    Promise(
        "stream-background",
        "Streaming",
        "What a process prints that outlives its execution is kept, head and tail, and shown marked with later ones.",
    ),
    Promise("stream-images", "Streaming", "Images and open figures become events, among the logs."),
    Promise("stream-flat", "Streaming", "A flood of output does not fill the daemon's memory."),
    Promise(
        "stream-broken",
        "Streaming",
        "A connection to the guest that breaks in mid-execution loses nothing and repeats nothing.",
    ),
    # -- How executions end
    Promise("end-exception", "How executions end", "An exception or a syntax error is EXCEPTION; variables are kept."),
    Promise(
        "end-timeout",
        "How executions end",
        "Past its wall time a program is TIMEOUT; one that listens keeps its variables.",
    ),
    Promise(
        "end-timeout-deaf",
        "How executions end",
        "A program that does not listen, in C or with its signals blocked, is ended with its interpreter: TIMEOUT, reset.",
    ),
    Promise("end-cpu", "How executions end", "Past its CPU time a program is CPU_LIMIT."),
    Promise(
        "end-cpu-children",
        "How executions end",
        "CPU time of the processes that a program starts counts.",
    ),
    Promise(
        "charge-background",
        "How executions end",
        "CPU time of what runs on between executions is charged while it runs.",
    ),
    Promise(
        "end-operations", "How executions end", "Past its operations a program is OPERATION_LIMIT, whatever it catches."
    ),
    Promise("end-output", "How executions end", "A program that prints without end is OUTPUT_LIMIT."),
    Promise(
        "end-memory",
        "How executions end",
        "Past its memory a program is OUT_OF_MEMORY, its own or shared memory; the session goes on.",
        {"local": _CGROUP, "e2b": _HOST_MEMORY},
    ),
    Promise(
        "end-exit",
        "How executions end",
        "A program that exits is EXITED: `SystemExit` keeps variables, `os._exit` does not.",
    ),
    Promise(
        "end-unfit",
        "How executions end",
        "An interpreter that a program leaves unfit for the next one is replaced, and that is reported with the program.",
    ),
    Promise(
        "end-checker",
        "How executions end",
        "What other processes do to the checking of a source is never reported as an error of the source.",
    ),
    Promise(
        "end-crash",
        "How executions end",
        "An interpreter that crashes, or is killed by whomever, is CRASHED; the next one takes over.",
    ),
    Promise(
        "end-import", "How executions end", "An import that is not authorized is IMPORT_DENIED, and names what is."
    ),
    Promise(
        "end-hostile-source",
        "How executions end",
        "A source that breaks the parser costs one execution.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise(
        "end-fork-bomb",
        "How executions end",
        "A fork bomb is bounded, and the session goes on.",
        {"local": _CGROUP, "e2b": _HOST_PROCESSES},
    ),
    Promise(
        "end-kill-all",
        "How executions end",
        "A program that kills all that it can hurts itself only.",
    ),
    Promise(
        "end-lost",
        "How executions end",
        "A sandbox that dies, by whatever, is LOST: execution and session say so, once.",
    ),
    Promise(
        "end-lost-supervisor",
        "How executions end",
        "A supervisor that is killed takes its sandbox along: LOST.",
    ),
    Promise(
        "end-lost-cause", "How executions end", "The cause of a death is given in a clause, without a path of the host."
    ),
    # -- Interrupting
    Promise("interrupt", "Interrupting", "A program that is cancelled is CANCELLED, and variables are kept."),
    Promise("interrupt-waiting", "Interrupting", "An execution that waits can be cancelled, and never runs."),
    Promise(
        "interrupt-again",
        "Interrupting",
        "A stopped program that waits again, for a pool or in a `finally`, is interrupted again: variables are kept.",
        proved_on=_TWO_GUESTS,
    ),
    # -- Files
    Promise(
        "files-transfer",
        "Files",
        "Files are put, listed and got, of any content; an empty one is one, a missing one none.",
    ),
    Promise("files-busy", "Files", "They are served while a program hangs."),
    Promise("files-whole", "Files", "A file is written whole or not at all."),
    Promise(
        "files-paths",
        "Files",
        "Paths and links lead where the kernel follows them for the sandbox's user, and the kernel's refusals have reasons.",
    ),
    Promise(
        "files-hostile",
        "Files",
        "No path or link leads into /proc; FIFOs, devices and sockets are neither read nor written.",
    ),
    Promise("files-manage", "Files", "Entries are described, made, moved and removed, a tree without blocking others."),
    Promise("files-archives", "Files", "A directory goes in and comes out as an archive."),
    Promise(
        "files-archives-hostile",
        "Files",
        "A hostile member of an archive is refused by its name.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise(
        "files-artifacts",
        "Files",
        "A result lists the files that its execution made or changed, however it ended.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise(
        "files-listing",
        "Files",
        "A listing is bounded, and survives names that are no text.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise(
        "files-watched",
        "Files",
        "Changes of files are reported as they come, each once, or that some were lost.",
    ),
    # -- Savepoints
    Promise(
        "savepoints",
        "State",
        "A session goes back to a savepoint with all that its memory held, and says what it could not take back.",
    ),
    Promise(
        "branches",
        "State",
        "Code is tried in a branch, which says what it has changed and leaves the session as it was.",
    ),
    # -- Processes
    Promise(
        "processes",
        "Processes",
        "Commands run beside executions: their streams, exit codes, input, signals and timeouts.",
    ),
    Promise("processes-terminal", "Processes", "A process may have a terminal of a size."),
    Promise(
        "processes-spared",
        "Processes",
        "They outlive an interpreter that is replaced; everything else in the sandbox ends with it.",
    ),
    Promise(
        "ports",
        "Processes",
        "A port on a sandbox's loopback is reached from outside, both ways, without a network.",
    ),
    # -- Limits
    Promise(
        "limit-disk",
        "Limits",
        "What a program or a client writes is bounded by disk_bytes.",
        {"e2b": _HOST_DISK},
    ),
    Promise(
        "limit-files",
        "Limits",
        "The files of the workspace, and of /tmp, are at most max_files; more meet ENOSPC.",
        {"e2b": _HOST_DISK},
    ),
    Promise(
        "limit-budgets",
        "Limits",
        "Operations of an execution and of a session are exact, and warned of at four fifths.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise("limit-idle", "Limits", "A session that is not used ends after idle_time_s; one in use does not."),
    Promise("limit-age", "Limits", "A session ends at session_time_s, in use or not."),
    Promise("limit-orphan", "Limits", "A sandbox that no daemon speaks to for orphan_time_s ends itself."),
    # -- The daemon restarts
    Promise(
        "restart-adopt",
        "The daemon restarts",
        "The next daemon takes over the sandboxes that it knows, and their guests answer.",
    ),
    Promise(
        "restart-session",
        "The daemon restarts",
        "A session goes on with its variables; what ran meanwhile is delivered, once.",
    ),
    Promise("restart-strays", "The daemon restarts", "Sandboxes that no session knows are destroyed at the start."),
    Promise(
        "restart-dead",
        "The daemon restarts",
        "A sandbox that died meanwhile, as in a reboot of its host, is not taken over: its session is LOST.",
    ),
    Promise("restart-alone", "The daemon restarts", "Two daemons can't share a state directory."),
    # -- Leftovers
    Promise(
        "sweep",
        "Nothing is left",
        "A sweep finds what belongs to no session and spares what lives, also what is being made.",
    ),
    Promise(
        "leak-destroy",
        "Nothing is left",
        "A sandbox that is destroyed leaves nothing; that may be repeated, raced and cancelled.",
    ),
    Promise("leak-dead", "Nothing is left", "One that died by itself is removed all the same."),
    Promise("leak-session", "Nothing is left", "The end of a session is the end of its sandbox."),
    Promise(
        "leak-close",
        "Nothing is left",
        "A backend that closes destroys every sandbox, also one that is being made, and makes no more.",
    ),
    # -- Pausing
    Promise(
        "pause",
        "Pausing",
        "An idle sandbox can be paused, with all that is in its memory, and woken: its guest goes on where it was.",
        {
            "local": _not("A sandbox costs its memory and nothing else. It says that it goes on, and does."),
            "docker": _not("A sandbox costs its memory and nothing else. It says that it goes on, and does."),
        },
    ),
    Promise(
        "rest",
        "Pausing",
        "An idle sandbox releases what it does not need, and gets it back.",
        {},
        ("local", "docker"),
    ),
    # -- State
    Promise(
        "state-export",
        "State",
        "What a session has, variables and files, can be written down, and goes on in a sandbox of any backend.",
    ),
    Promise(
        "state-hostile",
        "State",
        "What can't be written down, or restored, costs itself and not the session, and is named.",
    ),
    # -- Tools
    Promise(
        "tools-host",
        "Tools",
        "A tool on the host is called from the sandbox; arguments, answers and exceptions travel whole.",
    ),
    Promise("tools-final", "Tools", "A final answer ends the execution, whatever the program catches."),
    Promise("tools-time", "Tools", "The wall clock stands still while a tool is called; an answer counts once."),
    Promise(
        "tools-time-threads",
        "Tools",
        "While a tool is called, the wall clock goes on for other threads of the program that run.",
    ),
    Promise("tools-lasting", "Tools", "Tools are there again in the next interpreter, and replaced as a whole."),
    Promise(
        "tools-threads",
        "Tools",
        "Threads call tools; a call past its execution fails.",
        proved_on=_NOT_IN_THE_CLOUD,
    ),
    Promise(
        "tools-sandbox",
        "Tools",
        "A tool that is shipped runs in the sandbox, is made there before it is registered, and again in each interpreter.",
    ),
    Promise(
        "tools-sandbox-shapes",
        "Tools",
        "Shipped tools of every shape work, and what can't be made is refused with the reason.",
        proved_on=_SAME_GUEST,
    ),
    # -- Rules
    Promise(
        "rules-imports",
        "Rules",
        "What agent code may import is checked; what an authorized library imports is not.",
        proved_on=_TWO_GUESTS,
    ),
    Promise(
        "rules-language",
        "Rules",
        "The rules of the language hold however they are got around, and change with the policy.",
        proved_on=_TWO_GUESTS,
    ),
    Promise(
        "rules-same",
        "Rules",
        "A large corpus of programs gets the same verdicts on every CPython from 3.9 on.",
        proved_on=_SAME_GUEST,
    ),
    Promise(
        "python-any",
        "Rules",
        "The guest runs on every CPython from 3.9 on, whatever the daemon runs on.",
        proved_on=_SAME_GUEST,
    ),
    Promise(
        "preload",
        "Rules",
        "Modules that the image names are imported ahead and cost a program nothing.",
        proved_on=_SAME_GUEST,
    ),
)
BY_ID = {promise.promise_id: promise for promise in PROMISES}
TOPICS = tuple(dict.fromkeys(promise.topic for promise in PROMISES))


def unproved(proofs: Iterable[tuple[str, str, bool]]) -> list[str]:
    """Lists what lacks a test. `proofs`: (id of a promise, backend, True for the behaviour in its place)."""
    there = set(proofs)
    missing = []
    for promise in PROMISES:
        for backend in BACKENDS:
            if promise.is_proved_on(backend) and (promise.promise_id, backend, False) not in there:
                missing.append(f"no test proves {promise.promise_id} on {backend}")
            if promise.keeping(backend) is Keeping.NOT_KEPT and (promise.promise_id, backend, True) not in there:
                missing.append(f"no test shows what {backend} does instead of {promise.promise_id}")
    return missing
