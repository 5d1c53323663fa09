"""`executor`: runs files and an interactive Python in sandboxes, copies files, serves MCP hosts, from a shell.

Exit codes of `run`: 0 when the program succeeded, 1 when it did not, 2 when it could not be run, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from executor_client import _repl
from executor_client._copy import copy
from executor_client._endpoint import TlsConfig
from executor_client._local import place
from executor_client._policy_text import policy_lines
from executor_client._terminal import Console, aligned
from executor_client.checkpoint import Checkpoint
from executor_client.client import ExecutorClient
from executor_client.errors import ExecutorClientError, InvalidRequest
from executor_client.mcp import command as mcp_command
from executor_client.results import ExecutionResult, SessionInfo, StateManifest
from executor_client.session import Session

EXIT_SUCCEEDED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = _parser().parse_args(arguments)
    console = Console(image_dir=getattr(options, "save_images", None))
    try:
        if hasattr(options, "serve"):  # it has a client of its own
            return int(options.serve(options, _tls(options), console))
        with ExecutorClient(
            options.address, token=options.token, tls=_tls(options), on_wait=console.show_wait
        ) as client:
            code: int = options.command(client, options, console)
            return code
    except KeyboardInterrupt:
        console.fail("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). The interpreter's last flush must not meet the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ExecutorClientError as error:
        console.fail(error.message)
        return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="executor", description="Run Python in sandboxes.")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("remote-executor"))
    parser.add_argument("--address", help="the daemon: host:port or unix:PATH (default: this user's own)")
    parser.add_argument("--token", help="the daemon's token (better: EXECUTOR_TOKEN, which others cannot see)")
    parser.add_argument("--tls", action="store_true", help="use TLS; implied by those below")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="whom to trust (default: the public authorities)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="our own certificate, and")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key; a token may not be needed then")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a file; its output comes as it is printed")
    run.add_argument("file", metavar="FILE", help="a Python file, - for standard input")
    _add_session_options(run)
    run.add_argument(
        "--get-artifacts",
        type=Path,
        metavar="DIR",
        help="save the files here that the program made or changed, over others of the same names",
    )
    run.set_defaults(command=_run)

    repl = commands.add_parser("repl", help="an interactive Python in a sandbox")
    _add_session_options(repl)
    repl.set_defaults(command=_run_repl)

    cp = commands.add_parser("cp", help="copy a file or a directory from or to a session's workspace")
    cp.add_argument("source", metavar="SRC", help="a local path, or SESSION:PATH; the beginning of an id will do")
    cp.add_argument("target", metavar="DST", help="SESSION:PATH, or a local path")
    cp.set_defaults(command=_copy)

    ps = commands.add_parser("ps", help="list the sessions")
    ps.set_defaults(command=_list_sessions)

    mcp_command.add_parser(commands)

    policy = commands.add_parser("policy", help="tell what may be asked for")
    policy.set_defaults(command=_show_policy)
    return parser


def _tls(options: argparse.Namespace) -> TlsConfig | None:
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    return TlsConfig(*files) if options.tls or any(files) else None


def _add_session_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--imports", type=_names, default=(), metavar="A,B", help="more modules to authorize: numpy.*,os.path"
    )
    parser.add_argument("--image", help="the sandbox's image (default: the policy's)")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds that an execution may take")
    parser.add_argument("--state", type=Path, metavar="FILE", help="begin with the variables and files saved there")
    parser.add_argument("--save-state", type=Path, metavar="FILE", help="save variables and files there at the end")
    parser.add_argument("--save-images", type=Path, metavar="DIR", help="keep displayed images and figures here")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextlib.contextmanager
def _session(client: ExecutorClient, options: argparse.Namespace, console: Console) -> Iterator[Session]:
    """A session as the options have it, which begins with a state and leaves one where they say so."""
    limits = {} if options.timeout is None else {"wall_time_s": options.timeout}
    state = None if options.state is None else _loaded(options.state)
    with client.create_session(
        options.image, options.imports, limits, labels={"client": "executor"}, state=state
    ) as session:
        if session.restored is not None:
            _show_omissions(session.restored, "restored", console)
        yield session
        if options.save_state is not None:
            _save_state(session, options.save_state, console)


def _loaded(path: Path) -> Checkpoint:
    try:
        return Checkpoint.load(path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _save_state(session: Session, path: Path, console: Console) -> None:
    state = session.export_state()
    try:
        state.save(path)
    except OSError as error:
        raise InvalidRequest(f"the state was not saved: {error}") from error
    if state.manifest is not None:
        _show_omissions(state.manifest, "saved", console)


def _show_omissions(manifest: StateManifest, verb: str, console: Console) -> None:
    for name, why in (*manifest.omitted_variables.items(), *manifest.omitted_files.items()):
        console.remark(f"{name!r} was not {verb}: {why!r}")


def _run(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    try:
        code = sys.stdin.read() if options.file == "-" else Path(options.file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        console.fail(f"{options.file} cannot be read: {error}")
        return EXIT_REFUSED
    with _session(client, options, console) as session:
        result = session.execute(code, on_event=console.show_event)
        if options.get_artifacts is not None:
            _save_artifacts(session, result, options.get_artifacts, console)
        console.show_end(result)
        console.show_artifacts(result)
    return EXIT_SUCCEEDED if result.succeeded else _exit_code(result)


def _save_artifacts(session: Session, result: ExecutionResult, directory: Path, console: Console) -> None:
    for artifact in result.artifacts:
        try:
            session.files.get(artifact.path, place(directory, artifact.path))
        except (ExecutorClientError, OSError) as error:
            console.remark(f"{artifact.path!r} was not saved: {error}")


def _copy(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    try:
        copy(client, options.source, options.target)
    except OSError as error:
        console.fail(str(error))
        return EXIT_REFUSED
    return EXIT_SUCCEEDED


def _exit_code(result: ExecutionResult) -> int:
    """The program's own, when it chose one."""
    if result.error is not None and result.error.exit_code is not None:
        return result.error.exit_code
    return EXIT_FAILED


def _run_repl(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    with _session(client, options, console) as session:
        return _repl.run(session, console)


def _list_sessions(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    rows: list[tuple[str, ...]] = [
        ("SESSION", "STATE", "IMAGE", "BACKEND", "PYTHON", "GENERATION", "EXPIRES", "LABELS")
    ]
    rows += [_row(info) for info in sorted(client.list_sessions(), key=lambda info: info.create_time)]
    print("\n".join(aligned(rows)))
    return EXIT_SUCCEEDED


def _show_policy(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    print("\n".join(policy_lines(client.get_policy())))
    return EXIT_SUCCEEDED


def _row(info: SessionInfo) -> tuple[str, ...]:
    left_s = max(0, int((info.expire_time - datetime.now(UTC)).total_seconds()))
    labels = ",".join(f"{key}={value}" for key, value in sorted(info.labels.items()))
    state = f"{info.state.value} ({info.lost_reason})" if info.lost_reason else info.state.value
    # Labels are free text of whoever made the session.
    what = (info.session_id, state, info.image, info.backend, info.python_version)
    return (*what, str(info.generation), f"in {left_s} s", labels)


if __name__ == "__main__":
    sys.exit(main())
