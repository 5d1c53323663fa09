"""A daemon with its fork server, from the client's side: whose sandboxes come from which template process, and when there is one."""

from __future__ import annotations

from contextlib import ExitStack

import psutil

from executor_client import ExecutorClient, Outcome, Session
from executor_server.guest.wire.fork_server_messages import PARENT_NAME, TEMPLATE_NAME
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.eager_daemon import EAGER_SERVER
from tests.support.polling import eventually

# The template processes have no libraries then, and are there at once.
SMALL = {"memory_bytes": 2**28}
NO_POOL = "pool.size = 0"
TEMPLATE_TIMEOUT_S = 120.0
"""Seconds in which a loaded machine imports the usual libraries."""


def policy_of(value: str) -> str:
    return f'default = "default"\n[profiles.default]\nsandbox.fork_server = "{value}"\n'


def template_of(session: Session) -> int | None:
    """The number of the template process whose child the session's first process is; None when bubblewrap made it."""
    command = ["sleep", f"1000.{int(session.session_id, 16)}"]
    ran = session.execute(f"import subprocess; process = subprocess.Popen({command})")
    assert ran.outcome is Outcome.SUCCEEDED, ran.error
    # `Popen` returns a moment before the kernel shows the command of the new program.
    (ours,) = eventually(lambda: [each for each in psutil.process_iter() if _command_of(each) == command])
    templates = [parent.pid for parent in ours.parents() if parent.name() == TEMPLATE_NAME]
    return templates[0] if templates else None


def _processes(daemon: Daemon) -> list[psutil.Process]:
    return psutil.Process(daemon.process.pid).children(recursive=True)


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def forked(
    client: ExecutorClient, daemon: Daemon, stack: ExitStack, limits: dict[str, int] = SMALL
) -> tuple[Session, int]:
    """A session from a template process, and the template process; sessions before it come from bubblewrap."""
    found: list[tuple[Session, int]] = []

    def try_one() -> bool:
        session = client.create_session(authorized_imports=["*"], limits=limits)
        template = template_of(session)
        if template is None:
            session.close()
        else:
            found.append((stack.enter_context(session), template))
        return bool(found)

    assert eventually(try_one, timeout_s=TEMPLATE_TIMEOUT_S), daemon.log.read_text()
    return found[0]


def test_two_tenants_never_share_a_template_and_one_shares_with_itself() -> None:
    require("local")
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_of(NO_POOL, policy=policy_of("tenant"), program=EAGER_SERVER))
        clients = [stack.enter_context(daemon.client_of(tenant)) for tenant in ("alice", "bob")]
        templates = {each: {forked(each, daemon, stack)[1] for _ in range(2)} for each in clients}
        (of_alice,), (of_bob,) = templates.values()
        assert of_alice != of_bob


def test_a_shared_template_makes_the_sandboxes_of_all_tenants() -> None:
    require("local")
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_of(NO_POOL, policy=policy_of("shared"), program=EAGER_SERVER))
        clients = [stack.enter_context(daemon.client_of(tenant)) for tenant in ("alice", "bob")]
        assert len({forked(each, daemon, stack)[1] for each in clients}) == 1


def test_a_template_with_libraries_serves_although_arrow_is_among_them() -> None:
    """pandas imports it, and its allocator has a thread, which was a reason to serve no sandbox at all."""
    require("local")
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_of(NO_POOL, policy=policy_of("shared"), program=EAGER_SERVER))
        client = stack.enter_context(daemon.client())
        session, _ = forked(client, daemon, stack, {"memory_bytes": 2**31})
        code = "import sys\nready = 'pyarrow' in sys.modules\nimport pyarrow.compute as pc\n(ready, pc.sum([1, 2]).as_py())"
        assert session.execute(code).raise_for_outcome().output == (True, 3)


def test_a_daemon_with_a_pool_and_one_session_has_no_fork_server() -> None:
    require("local")
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_of("", policy=policy_of("shared")))
        session = stack.enter_context(stack.enter_context(daemon.client()).create_session())
        assert session.execute("1+1").output == 2
        # Two are kept, and one is in use.
        assert eventually(lambda: _names(daemon).count("bwrap") == 3), _names(daemon)
        assert PARENT_NAME not in _names(daemon)


def _names(daemon: Daemon) -> list[str]:
    return [_name_of(process) for process in _processes(daemon)]


def test_a_daemon_that_stays_has_the_usual_libraries_imported_for_its_sessions() -> None:
    """By default, and before anybody asks: a first `import pandas` took seconds in each session."""
    require("local")
    with daemon_of("") as daemon, daemon.client() as client:
        assert eventually(lambda: "fork_server_ready" in daemon.log.read_text(), timeout_s=60)

        def imported() -> object:
            with client.create_session(authorized_imports=["platform", "sys"]) as session:
                found = session.execute("import sys; [name for name in ('numpy', 'pandas') if name in sys.modules]")
                name = session.execute("import platform; platform.node()").output
                assert name == "sandbox", "libraries keep the name of the host on which they were imported"
                return found.output == ["numpy", "pandas"]

        assert eventually(imported)


def test_the_workspace_of_a_forked_sandbox_belongs_to_its_user() -> None:
    require("local")
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_of(NO_POOL, policy=policy_of("shared"), program=EAGER_SERVER))
        session, _ = forked(stack.enter_context(daemon.client()), daemon, stack)
        owner, user = session.processes.run("stat -c %u .; id -u").stdout.split()
        assert owner == user
