"""The commands of `executor`. Each gets a client, which connects at its first call."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from executor_client._core.convert import limits_to_wire
from executor_client._core.endpoint import TlsConfig
from executor_client._core.limits import FILE_BYTES_MAX
from executor_client._core.local import path_below
from executor_client._core.policy_text import policy_lines
from executor_client._core.requests import freely_allowed
from executor_client._core.terminal import aligned
from executor_client.checkpoint import Checkpoint
from executor_client.cli import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_SUCCEEDED,
    approving,
    environments,
    listing,
    recordings,
    repl,
    top,
)
from executor_client.cli.completion import completion
from executor_client.cli.console import Console, disk_advice
from executor_client.cli.copying import copy
from executor_client.cli.import_hints import show_end
from executor_client.cli.naming import find_session, located, matching_id, names_of, refuse_for_existing
from executor_client.cli.script import Script, placed, with_files
from executor_client.cli.script_header import ScriptHeader, read_header
from executor_client.client import ExecutorClient
from executor_client.errors import ExecutorClientError, InvalidRequest, NotFoundError
from executor_client.file_results import FileInfo
from executor_client.results import ExecutionResult, Outcome, Policy, StateManifest
from executor_client.session import Session


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command that the options name. Returns the exit code. Raises ExecutorClientError."""
    tls = _tls(options)
    if options.command == "completion":
        console.show_lines([completion(options.shell)])
        return EXIT_SUCCEEDED
    if options.command == "jupyter":
        return _install_kernel(options, console)
    if options.command == "record diff":
        return recordings.diff(options, console)
    if options.command == "replay" and not options.execute:
        return recordings.replay(options, console)
    if options.command == "mcp":  # it uses the asyncio client
        from executor_client.mcp.command import serve

        return serve(options, tls, console)
    if options.command in ("shell", "attach", "port-forward") or getattr(options, "argv", None) is not None:
        from executor_client.cli import processes

        return processes.run(options, tls, console)
    on_approval = approving.on_approval(options, console)
    console.asks = on_approval is not None
    with ExecutorClient(
        options.address, token=options.token, tls=tls, on_wait=console.show_wait, on_approval=on_approval
    ) as client:
        return _COMMANDS[options.command](client, options, console)


def _tls(options: argparse.Namespace) -> TlsConfig | None:
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    return TlsConfig(*files) if options.tls or any(files) else None


# ---------------------------------------------------------------------------------------------------------------------
# Running code


def _run(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    script = _script(options)
    if options.imports is not None and script.argv[1:]:
        options.imports = (*options.imports, "sys")
    header = _read_header(script.argv[0], script.source, options, console)
    saved: dict[str, int] = {}
    with _session(client, options, console) as session, _recording(session, options.record):
        header.check_python(session.info.python_version, session.info.image)
        script.put_files(session)
        for code in script.steps(session, is_last=not (options.session or options.save_state)):
            result = session.execute(code, on_event=console.show_event, limits=_step_limits(options))
            if options.get_artifacts is not None:
                _save_artifacts(session, result, options.get_artifacts, saved, console)
            if script.cells and result.succeeded:
                console.show_value(result.output)
            if not (script.launches and result.outcome is Outcome.EXITED):  # it has printed its own traceback
                show_end(console, session, script.described(result), "--imports {}")
            console.show_artifacts(result)
            if not result.succeeded:
                return _exit_code(result)
    return EXIT_SUCCEEDED


def _script(options: argparse.Namespace) -> Script:
    """Returns the program that the options name. Raises InvalidRequest."""
    if options.code:
        given: list[str] = [*options.code, *options.program]  # argparse splits an option's values at --
        return Script(["-c", *given[1:]], given[0], files=placed(options.put))
    if not options.program and sys.stdin.isatty():
        raise InvalidRequest("nothing to run: pass a FILE, - for standard input, or -c CODE")
    name, *arguments = options.program or ["-"]
    if name == "-":
        return Script([name, *arguments], _read(name), files=placed(options.put))
    return with_files(name, _read(name), arguments, options.put)


def _recording(session: Session, path: Path | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager that records the session in the file, if a path is given. Raises InvalidRequest."""
    if path is None:
        return contextlib.nullcontext()
    try:
        return session.record(path)
    except OSError as error:
        raise InvalidRequest(f"{path} can't be written: {error.strerror}{disk_advice(error)}") from error


def _read_header(name: str, code: str, options: argparse.Namespace, console: Console) -> ScriptHeader:
    """Reads the program's header, and adds its packages to the requested ones. Raises InvalidRequest."""
    header = read_header(code, name)
    if header.unclosed_line:
        console.remark(f"{name}, line {header.unclosed_line}: ignored this header, because it has no end (`# ///`)")
    if header.dependencies and options.session:
        console.remark("ignored the packages in the script's header: an existing session keeps its packages")
    elif header.dependencies:
        options.packages = list(dict.fromkeys([*options.packages, *header.dependencies]))
    return header


def _read(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read()
        with tokenize.open(name) as file:  # decodes by the file's coding line, and drops a byte order mark
            return file.read()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from error


def _execute(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    if options.code is None:
        raise InvalidRequest("nothing to run: use executor exec SESSION -- COMMAND, or executor exec SESSION CODE")
    code = _read("-") if options.code == "-" else options.code
    given = {"-t": options.tty, "-d": options.detach, "--cwd": options.cwd, "--env": options.variables}
    if misplaced := [name for name, value in given.items() if value]:
        raise InvalidRequest(f"{' and '.join(misplaced)}: only for a command, after --")
    session = find_session(client, options.session)
    limits = None if options.timeout is None else {"wall_time_s": options.timeout}
    result = session.execute(code, on_event=console.show_event, limits=limits)
    show_end(console, session, result)
    if result.succeeded:
        console.show_value(result.output)
    return EXIT_SUCCEEDED if result.succeeded else _exit_code(result)


def _run_repl(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    with _session(client, options, console) as session:
        return repl.run(session, console)


@contextlib.contextmanager
def _session(client: ExecutorClient, options: argparse.Namespace, console: Console) -> Iterator[Session]:
    """Yields the session that the options name, which is kept, or a new session, which is ended.

    Loads and saves a state if the options say so. Raises InvalidRequest for options that contradict each other.
    """
    session_of: contextlib.AbstractContextManager[Session]
    if options.session:
        session_of = _existing_session(client, options)
    else:
        session_of = _new_session(client, options, console)
        if options.name is not None:
            session_of = contextlib.nullcontext(session_of)  # it is kept
    with session_of as session:
        if session.restored is not None:
            _show_omissions(session.restored, "restored", console)
        if options.mcp_config is not None:
            session.register_mcp(_load_mcp_config(options.mcp_config))
        yield session
        if options.save_state is not None:
            _save_state(session, options.save_state, console)


@contextlib.contextmanager
def _existing_session(client: ExecutorClient, options: argparse.Namespace) -> Iterator[Session]:
    refuse_for_existing(options)
    session = find_session(client, options.session)
    if options.imports:
        session.authorize_imports(options.imports)
    yield session


def _new_session(client: ExecutorClient, options: argparse.Namespace, console: Console) -> Session:
    limits = dict(options.limits)
    if options.timeout is not None:
        limits["wall_time_s"] = options.timeout
    state = None if options.state is None else _load_state(options.state)
    labels = {"client": "executor"}
    modules = environments.modules_of(client, options, console) if options.packages else ()
    session = client.create_session(
        options.image,
        options.imports or (),
        limits,
        labels,
        network=options.network,
        packages=options.packages,
        node_labels=dict(options.node_labels),
        state=state,
        name=options.name,
        detached=options.name is not None,
    )
    console.end_wait()
    if options.imports is not None:
        environments.authorize(session, modules)
    else:
        _authorize_allowed(client.get_policy(), session, console)
    return session


def _authorize_allowed(policy: Policy, session: Session, console: Console) -> None:
    """Authorizes the imports that the policy allows without an approval."""
    allowed = freely_allowed(policy)
    if len(allowed) < len(policy.allowed_imports):
        console.remark(
            "only the policy's default imports are authorized, because others may need an approval; --imports adds some"
        )
    if allowed:
        session.authorize_imports(allowed)


def _install_kernel(options: argparse.Namespace, console: Console) -> int:
    try:
        from executor_client.integrations.jupyter_kernelspec import install
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"Jupyter is missing ({error.name}): pip install 'remote-executor[jupyter]'") from error
    limits_to_wire(dict(options.limits))  # a wrong name fails here, not when the kernel starts
    given = {
        "address": options.address,
        "image": options.image,
        "limits": dict(options.limits),
        "network": options.network,
        "packages": options.packages,
    }
    shown = options.display_name or f"Python ({options.name})"
    kept = {name: value for name, value in given.items() if value}
    try:
        place = install(options.name, shown, kept, forwarding=options.forwarding, prefix=options.prefix)
    except (OSError, ValueError) as error:  # ValueError: the name
        raise InvalidRequest(f"the kernel can't be installed: {error}") from error
    console.show_lines(
        [f"{place}: Jupyter shows it as {shown}", f"remove it: jupyter kernelspec remove {options.name}"]
    )
    return EXIT_SUCCEEDED


def _step_limits(options: argparse.Namespace) -> dict[str, float] | None:
    """Returns the time limit for this execution alone, which applies in an existing session."""
    return {"wall_time_s": options.timeout} if options.session and options.timeout is not None else None


def _exit_code(result: ExecutionResult) -> int:
    """Returns the exit code of a failed program: its own, if it exited with one."""
    if result.error is not None and result.error.exit_code is not None:
        return result.error.exit_code
    return EXIT_FAILED


def _save_artifacts(
    session: Session, result: ExecutionResult, directory: Path, saved: dict[str, int], console: Console
) -> None:
    """Saves the files that a program made, and notes their sizes in `saved`.

    Together they have at most the bytes that the sandbox's disk holds: hard links and sparse files have far more.
    """
    total = session.limits.disk_bytes or FILE_BYTES_MAX
    for artifact in result.artifacts:
        left = total - sum(size for path, size in saved.items() if path != artifact.path)
        if artifact.size_bytes > left:
            console.remark(
                f"{artifact.path!r} was not saved: it has {artifact.size_bytes:,} bytes, and the saved files may have "
                f"{total:,} together, like the sandbox's disk; compress it there"
            )
            continue
        try:
            target = path_below(directory, artifact.path)
            saved[artifact.path] = session.files.get(artifact.path, target, max_bytes=left).size_bytes
        except (ExecutorClientError, OSError) as error:
            console.remark(f"{artifact.path!r} was not saved: {error}{disk_advice(error)}")


def _load_state(path: Path) -> Checkpoint:
    try:
        return Checkpoint.load(path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _load_mcp_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f'{path} must have an object: {{"mcpServers": {{"name": {{"command": "..."}}}}}}')
    return config


def _save_state(session: Session, path: Path, console: Console) -> None:
    state = session.export_state()
    try:
        state.save(path)
    except OSError as error:
        raise InvalidRequest(f"the state was not saved: {error}{disk_advice(error)}") from error
    if state.manifest is not None:
        _show_omissions(state.manifest, "saved", console)


def _show_omissions(manifest: StateManifest, verb: str, console: Console) -> None:
    for name, why in (*manifest.omitted_variables.items(), *manifest.omitted_files.items()):
        console.remark(f"{name!r} was not {verb}: {why!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Sessions and their files


def _list_files(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    place = located(options.place)
    prefix, path = (place.session, place.path) if place is not None else (options.place, "")
    listed = find_session(client, prefix).files.list(path)
    if options.json:
        console.show_json(list(listed))
        return EXIT_SUCCEEDED
    console.show_lines(aligned([("SIZE", "MODIFIED", "PATH"), *(_file_row(file) for file in listed)]))
    if listed.truncated:
        console.remark("the list is incomplete: there are more files")
    return EXIT_SUCCEEDED


def _file_row(file: FileInfo) -> tuple[str, ...]:
    size = "-" if file.is_directory else f"{file.size_bytes:,}"
    when = file.modify_time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return (size, when, f"{file.path}/" if file.is_directory else file.path)


def _copy(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    try:
        copy(client, options.source, options.target)
    except OSError as error:
        console.fail(f"{error}{disk_advice(error)}")
        return EXIT_REFUSED
    return EXIT_SUCCEEDED


def _end_sessions(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Ends all named sessions, or none if a name is wrong. Ignores sessions that have ended meanwhile."""
    if bool(options.sessions) == options.all:
        raise InvalidRequest("name the sessions to end, or pass --all; `executor ps` lists them")
    names = names_of(client.list_sessions())
    chosen = names if options.all else [matching_id(names, each) for each in options.sessions]
    for session_id in dict.fromkeys(chosen):
        with contextlib.suppress(NotFoundError):
            client.get_session(session_id).close()
            console.show_lines([session_id])
    return EXIT_SUCCEEDED


def _rename_session(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    find_session(client, options.session).rename(options.name)
    return EXIT_SUCCEEDED


def _show_policy(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    if options.json:
        console.show_json(client.get_policy())
    else:
        console.show_lines(policy_lines(client.get_policy()))
    return EXIT_SUCCEEDED


_COMMANDS: dict[str, Callable[[ExecutorClient, argparse.Namespace, Console], int]] = {
    "run": _run,
    "repl": _run_repl,
    "exec": _execute,
    "ps": listing.show,
    "ls": _list_files,
    "cp": _copy,
    "rm": _end_sessions,
    "rename": _rename_session,
    "policy": _show_policy,
    "top": top.show,
    "replay": recordings.execute_recording,
    "record list": recordings.list_all,
    "record get": recordings.get,
    "approvals": approving.watch,
    "approvals decide": approving.decide,
    "env build": environments.build,
}
