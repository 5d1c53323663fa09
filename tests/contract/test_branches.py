"""Branches: code runs in a copy of the interpreter, says what it has changed, and leaves the session as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from executor_server.core import (
    BranchEnd,
    NotFound,
    PolicyViolation,
    ProcessRequest,
    Reason,
    VariablesState,
)
from tests.contract.harness import Harness, Transcript, follow
from tests.contract.marks import promise
from tests.support.attacks import KILL_COPIES

WAIT_S = 20.0


def end_of(transcript: Transcript) -> BranchEnd:
    branch = transcript.ended.branch
    assert branch is not None
    return branch


@promise("branches")
async def test_a_branch_says_what_it_has_changed_and_leaves_the_session_as_it_was(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import os, random\nx, kept, gone, same = [1], 'k', 2, (1, 2)\nclass Point: pass\np = Point(); p.at = [0]\n"
        "open('a', 'w').write('one'); open('b', 'w').write('two'); os.mkdir('d')\n"
        "log = open('log', 'w+'); log.write('abc'); log.flush(); random.seed(3)",
    )
    tried = await harness.run(
        session,
        "import json\nx.append(2); del gone; new = 1; same = (1, 2); p.at.append(1)\n"
        "open('a', 'w').write('changed'); os.remove('b'); os.rmdir('d'); open('c', 'w').write('new')\n"
        "log.write('def'); log.flush()\nprint('tried', random.random())\nx",
        branch=True,
    )
    assert (tried.outcome, tried.output) == ("succeeded", [1, 2])
    branch = end_of(tried)
    assert branch.variables is not None
    assert branch.files is not None
    assert (branch.variables.added, branch.variables.changed) == (("json", "new"), ("p", "x"))
    assert (branch.variables.removed, branch.variables.unknown) == (("gone",), ())
    assert (branch.files.added, branch.files.changed, branch.files.removed) == (("c",), ("a", "log"), ("b", "d"))
    assert (branch.number, branch.refused, branch.why_not_kept, branch.left_out) == (1, "", "", ())
    assert (tried.state, tried.ended.generation, tried.ended.artifacts) == ("kept", 1, ())
    now = await harness.run(
        session,
        "print(x, gone, p.at, 'new' in globals(), 'json' in globals(), sorted(os.listdir()))\n"
        "print(open('a').read(), open('b').read(), open('log').read(), log.tell())\nprint('tried', random.random())",
    )
    assert now.stdout == ("[1] 2 [0] False False ['a', 'b', 'd', 'log']\none two abc 3\n" + tried.stdout)
    assert now.ended.generation == 1


@promise("branches")
async def test_a_session_goes_on_from_any_branch_that_is_kept(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = [0]")
    numbers = [
        end_of(await harness.run(session, f"x.append({n}); open('f', 'w').write('{n}')", branch=True)).number
        for n in (1, 2, 3)
    ]
    assert numbers == [1, 2, 3]
    back = await session.savepoints.roll_back(2)
    assert (back.generation, [(each.number, each.is_branch) for each in back.savepoints]) == (
        2,
        [(1, True), (2, True), (3, True)],
    )
    kept = await harness.run(session, "print(x, open('f').read())")
    assert (kept.stdout, kept.ended.generation, kept.state) == ("[0, 2] 2\n", 2, "kept")
    further = end_of(await harness.run(session, "x.append(4)", branch=True))
    assert further.number == 4
    await session.savepoints.roll_back(3)
    assert (await harness.run(session, "print(x, open('f').read())")).stdout == "[0, 3] 3\n"
    await session.savepoints.roll_back(4)
    assert (await harness.run(session, "print(x, open('f').read())")).stdout == "[0, 2, 4] 2\n"


@promise("branches")
async def test_a_branch_leaves_entries_alone_that_no_copy_can_hold(harness: Harness) -> None:
    """They were absent from the copy, so they counted as new, and the end of the branch removed them."""
    session = await harness.session()
    await harness.run(
        session,
        "import os\nos.mkfifo('pipe'); os.makedirs('closed/d'); os.mkdir('listed')\n"
        "for path in ('closed/d/f', 'listed/f', 'secret'): open(path, 'w').write('mine')\n"
        "os.chmod('secret', 0); os.chmod('closed', 0); os.chmod('listed', 0o400)",
    )
    tried = await harness.run(session, "open('new', 'w').close()", branch=True)
    files = end_of(tried).files
    assert files is not None
    assert (files.added, files.changed, files.removed, files.unknown) == (("new",), (), (), ())
    assert end_of(tried).left_out == ("files of the workspace that can't be copied, and stay as they are: 4",)
    opening = "for path in ('closed', 'listed', 'secret'): os.chmod(path, 0o700)\n"
    tried = await harness.run(session, opening + "os.mkfifo('other'); os.remove('pipe')", branch=True)
    assert end_of(tried).left_out[1:] == ("files of the workspace that could not be restored: 4",)
    now = await harness.run(
        session,
        "print(sorted(os.listdir()), *(open(path).read() for path in ('closed/d/f', 'listed/f', 'secret')))",
    )
    assert now.stdout == "['closed', 'listed', 'secret'] mine mine mine\n"


ENDS = {
    "exception": ("1 / 0", "exception", "its program has not succeeded"),
    "hard exit": ("import os; os._exit(3)", "exited", "its process has ended"),
    "deaf": ("sum(iter(int, 1))", "timeout", "its process has ended"),
    "timeout": ("while True: pass", "timeout", "its program has not succeeded"),
}


@promise("branches")
@pytest.mark.parametrize("how", ENDS)
async def test_however_a_branch_ends_the_session_is_as_it_was(harness: Harness, how: str) -> None:
    session = await harness.session()
    await harness.run(session, "x = [1]; open('f', 'w').write('before')")
    code, outcome, why = ENDS[how]
    changes = "x.append(2); open('f', 'w').write('after'); open('g', 'w').close()\n"
    tried = await harness.run(session, changes + code, branch=True, wall_time_s=0.5)
    assert (tried.outcome, tried.state, tried.ended.generation) == (outcome, "kept", 1)
    assert (end_of(tried).number, end_of(tried).why_not_kept, end_of(tried).left_out) == (0, why, ())
    now = await harness.run(session, "import os\nprint(x, os.listdir(), open('f').read())")
    assert (now.stdout, now.ended.generation) == ("[1] ['f'] before\n", 1)


@promise("branches")
async def test_what_the_session_has_open_stays_and_what_a_branch_has_started_ends(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        """
import asyncio, os, socket, subprocess
listener = socket.create_server(('127.0.0.1', 8124))
child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
await asyncio.sleep(0)
waiting = asyncio.ensure_future(asyncio.sleep(0, 'woken'))
""",
    )
    await session.processes.start(ProcessRequest("p", ("sleep", "1000")))
    tried = await harness.run(
        session,
        """
own = subprocess.Popen(['sleep', '999'])
apart = subprocess.Popen(['sleep', '999'], start_new_session=True)
with open('/tmp/pids', 'w') as file: file.write(f'{own.pid} {apart.pid}')
try: listener.accept()
except OSError as error: print(type(error).__name__)
""",
        branch=True,
    )
    assert tried.stdout == "OSError\n"
    assert end_of(tried).left_out == ("child processes of the program: 1", "open sockets: 1")
    now = await harness.run(
        session,
        """
print([os.path.exists(f'/proc/{pid}') for pid in open('/tmp/pids').read().split()])
print(child.communicate(b'alive')[0], await waiting)
client = socket.create_connection(('127.0.0.1', 8124)); print(listener.accept()[0].fileno() > 0)
print([p for p in os.listdir('/proc') if p.isdigit() and b'1000' in open(f'/proc/{p}/cmdline', 'rb').read()] != [])
""",
    )
    assert now.stdout == "[False, False]\nb'alive' woken\nTrue\nTrue\n", now.ended


@promise("branches")
async def test_no_branch_is_made_of_what_could_not_be_left_as_it_was(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import threading\nends = threading.Event()\nt = threading.Thread(target=ends.wait, name='counter')\nt.start()",
    )
    refused = await harness.run(session, "x = 1", branch=True)
    branch = end_of(refused)
    assert (refused.outcome, refused.ended.error.type if refused.ended.error else "") == ("exception", "BranchRefused")
    assert branch.refused == "1 threads of the program run (counter), and a copy of the process would lack them"
    assert (branch.number, branch.variables) == (0, None)
    await harness.run(session, "ends.set(); t.join()")
    left = await harness.run(
        session, "import time\nt = threading.Thread(target=time.sleep, args=(60,), daemon=True)\nt.start()", branch=True
    )
    assert (left.outcome, end_of(left).number) == ("succeeded", 0)
    assert "1 threads of the program run" in end_of(left).why_not_kept
    assert (await harness.run(session, "threading.active_count()")).output == 1


@promise("branches")
async def test_no_branch_is_made_beside_a_workspace_that_could_not_be_put_back(harness: Harness) -> None:
    session = await harness.session_under("state.savepoint_file_bytes = 10")
    await harness.run(session, "open('large', 'w').write('x' * 11)")
    refused = await harness.run(session, "open('large', 'w').write('y')", branch=True)
    assert end_of(refused).refused == "the files of the workspace have more than 10 bytes"
    assert (await harness.run(session, "open('large').read()")).output == "x" * 11
    await harness.change_policy(session, "state = { savepoint_file_bytes = 10, branches = 0 }")
    with pytest.raises(PolicyViolation):
        await harness.run(session, "x", branch=True)


@promise("branches")
async def test_the_oldest_branches_are_dropped_and_the_later_ones_by_a_rollback(harness: Harness) -> None:
    session = await harness.session_under("state.branches = 2")
    await harness.run(session, "x = 0")
    await session.savepoints.take()
    for number in (2, 3, 4):
        assert end_of(await harness.run(session, f"x = {number}", branch=True)).number == number
    assert [each.number for each in (await session.savepoints.listed()).savepoints] == [1, 3, 4]
    with pytest.raises(NotFound) as refused:
        await session.savepoints.roll_back(2)
    assert refused.value.reason is Reason.SAVEPOINT_NOT_FOUND
    await session.savepoints.roll_back(3)
    assert (await session.savepoints.take()).taken == 5
    back = await session.savepoints.roll_back(4)
    assert [each.number for each in back.savepoints] == [1, 3, 4], "a savepoint of another line is dropped"
    back = await session.savepoints.roll_back(1)
    assert [each.number for each in back.savepoints] == [1]
    assert (await harness.run(session, "x")).output == 0


@promise("branches")
async def test_a_branch_calls_tools_and_spends_the_budgets_of_the_session(harness: Harness) -> None:
    session = await harness.session(session_operations=1000)
    tools: dict[str, Callable[..., Any]] = {"ask": lambda: 42, "answer": lambda value: value}
    tried = await harness.run_with_tools(session, "x = ask()\nx", tools, branch=True)
    assert tried.output == 42
    final = await harness.run_with_tools(session, "answer(7)", tools, "answer", branch=True)
    assert final.ended.final_answer_call_id
    assert (await harness.run(session, "for n in range(500): pass", branch=True)).outcome == "succeeded"
    assert (await harness.run(session, "for n in range(700): pass", branch=True)).outcome == "operation_limit"
    assert (await harness.run(session, "for n in range(700): pass")).outcome == "operation_limit"


@promise("branches")
async def test_rules_are_those_of_now_in_a_branch_that_is_gone_on_from(harness: Harness) -> None:
    session = await harness.session_under("", imports=("json", "math"))
    tried = await harness.run(session, "import json; x = 1", branch=True)
    await harness.change_policy(session, 'imports.allowed = ["math"]')
    assert (await harness.run(session, "import json", branch=True)).outcome == "import_denied"
    await session.savepoints.roll_back(end_of(tried).number)
    assert (await harness.run(session, "import json")).outcome == "import_denied"
    assert (await harness.run(session, "import math\nx")).output == 1


@promise("branches")
async def test_a_branch_that_kills_the_interpreter_loses_the_variables_and_that_is_said(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    killed = await harness.run(session, KILL_COPIES, branch=True)
    assert (killed.outcome, killed.state, killed.ended.generation) == ("succeeded", "reset", 2)
    assert end_of(killed).left_out == ("the interpreter, which has ended, and with it the copy of the workspace",)
    now = await harness.run(session, "print('x' in globals())")
    assert (now.stdout, now.state, now.ended.generation) == ("False\n", "kept", 2)
    number = end_of(killed).number
    await session.savepoints.roll_back(number)
    assert (await harness.run(session, "x")).output == 1, "the branch itself is kept"


@promise("branches")
async def test_a_branch_is_cancelled_while_it_runs_and_while_it_waits(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    first = await harness.begin(session, "x = 2\nprint('begun', flush=True)\nwhile True: pass", branch=True)
    second = await harness.begin(session, "x = 3", branch=True)
    async with asyncio.timeout(WAIT_S):
        async for event in first.events():
            if "begun" in str(event.kind):
                break
    second.cancel()
    first.cancel()
    ended = [await follow(each) for each in (first, second)]
    assert [(each.outcome, each.ended.variables_state) for each in ended] == [("cancelled", VariablesState.KEPT)] * 2
    assert (await harness.run(session, "x")).output == 1


@promise("branches")
async def test_values_whose_own_code_misbehaves_are_unknown_or_seen_and_cost_nothing(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        """
class Bad:
    __slots__ = ('a',)
    def __repr__(self): raise SystemExit
    def __eq__(self, other): raise KeyboardInterrupt
    __hash__ = None
    @property
    def __class__(self): raise ValueError
class Sub(list): pass
class Endless(dict):
    def __iter__(self):
        while True: yield 1
bad, sub, endless = Bad(), Sub([1]), Endless(a=1)
bad.a = [1]; sub.extra = 1
loop = []; loop.append(loop)
deep = []
for _ in range(5000): deep = [deep]
wide = [0] * 2_000_000
a = b = [1]
""",
    )
    tried = await harness.run(
        session,
        "bad.a.append(2); sub.append(1); endless['b'] = 1; loop.append(1); b.append(2); wide[5] = 1",
        branch=True,
    )
    branch = end_of(tried)
    assert branch.variables is not None
    assert set(branch.variables.changed) == {"a", "b", "bad", "endless", "loop", "sub", "wide"}
    assert set(branch.variables.unknown) == {"deep"}
    assert (branch.variables.added, branch.variables.removed, branch.number) == ((), (), 1)


@promise("branches")
async def test_a_forged_list_of_changes_is_cut_and_the_session_goes_on(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    tried = await harness.run(
        session,
        """
import json, sys
branch = sys.modules['executor_guest.interpreter.branch']
names = [chr(0x1F600) * 1020 + '%04d' % i for i in range(85)]
forged = branch.Changes(added=names, changed=names, removed=names, unknown=names)
class Forged:
    head = lambda self: {'variables': forged.head(), 'files': forged.head()}
branch.BranchChanges = lambda **_: Forged()
branch.dumps = lambda value: json.dumps(value, ensure_ascii=False).encode()
""",
        branch=True,
    )
    end = end_of(tried)
    assert end.why_not_kept == ""
    for changes in (end.variables, end.files):
        assert changes is not None
        assert changes.truncated
        assert 0 < sum(map(len, changes.unknown)) <= 32 * 1024
    assert (await harness.run(session, "x")).output == 1


@promise("branches")
async def test_a_branch_that_does_not_answer_after_its_program_is_given_up_in_seconds(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    hanging = """
import sys
def hang(**_):
    while True: pass
sys.modules['executor_guest.interpreter.branch'].BranchChanges = hang
"""
    async with asyncio.timeout(WAIT_S):
        end = end_of(await harness.run(session, hanging, branch=True))
    assert (end.number, end.variables, end.why_not_kept) == (0, None, "the interpreter died or hung over it")
    assert (await harness.run(session, "x")).output == 1


@promise("branches")
async def test_a_value_that_takes_too_long_to_look_at_is_unknown(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "slow = [[i] for i in range(500_000)]")
    async with asyncio.timeout(WAIT_S):
        end = end_of(await harness.run(session, "x = 1", branch=True))
    assert end.variables is not None
    assert (end.number, end.variables.added, end.variables.unknown) == (1, ("x",), ("slow",))
