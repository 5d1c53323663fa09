"""The arguments of `executor`. Imports nothing slow, because a person waits for `--help`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import executor_client
from executor_client.cli import process_arguments
from executor_client.cli.completion import SHELLS
from executor_client.cli.options import (
    SESSION_HELP,
    Parser,
    add_access,
    add_imports,
    add_json,
    add_limits,
    add_network,
    add_node_labels,
    add_output_options,
    add_packages,
    listen_address,
    make_command,
    positive,
    speed,
)

_EXAMPLES = """\
examples:
  executor run script.py                     run a file in a sandbox of its own
  executor run -c 'print(6 * 7)'             run a line
  executor run --put data plot.py            copy a directory in for it
  executor run --with polars script.py       install a package for it
  executor repl                              interactive Python
  executor shell                             a terminal in a sandbox
  executor ps; executor rm --all             list sessions; end them
  executor run --help                        help for one command

The default daemon is this user's own, started by `executor-server serve`; --address or EXECUTOR_ADDRESS selects
another.
"""

_RUN_EXAMPLES = """\
examples:
  executor run script.py input.csv --fast          like `python script.py input.csv --fast`; also copies input.csv and
                                                   the Python files of the script's directory into the sandbox
  executor run --put data script.py                copy a directory in, too
  executor run --limit memory_bytes=2000000000 --limit wall_time_s=60 train.py
  executor run --network api.github.com fetch.py   allow a host, within the policy
  executor run --with 'polars>=1' --with pyarrow etl.py   install packages, within the policy; dependencies in the
                                                   script's header (PEP 723) work too
  executor run --session 3f2a -c 'print(x)'        run in an existing session, which is kept
  executor run --save-images out plot.py           keep the figures
  cat script.py | executor run -                   read the program from standard input
"""

_REPL_EXAMPLES = """\
examples:
  executor repl --with polars
  executor repl --session 3f2a              use an existing session, which is kept
In the repl, `help` lists its commands. Tab completes names from the sandbox.
"""

_ENV_EXAMPLES = """\
examples:
  executor env build requirements.txt
  executor env build pylock.toml            the locked versions (PEP 751)
  executor env build script.py              the dependencies in its header (PEP 723)
  executor env build --with polars          packages by name
Later sessions with the same packages and image start at once.
"""

_APPROVALS_EXAMPLES = """\
examples:
  executor approvals                        wait for requests, and decide each in the terminal
  executor approvals --json                 one line of JSON for each request
  executor approvals approve 9f3c --session
It needs a token of an admin, or one made by `executor-server token new --role approver`.
"""

_TOP_EXAMPLES = """\
examples:
  executor top                              until q or Ctrl-C, the busy sessions first
  executor top | head                       one table
It needs a token of an admin, or one made by `executor-server token new --role viewer`, which sees its own tenant.
"""

_LS_EXAMPLES = """\
examples:
  executor ls 3f2a          all files of the workspace
  executor ls 3f2a:out      files below a directory
"""

_REPLAY_EXAMPLES = """\
examples:
  executor replay run.rxr                   print the session with times
  executor replay run.rxr --speed 2         play it, twice as fast
  executor replay run.rxr --html run.html   one HTML file, to send to somebody
  executor replay run.rxr --execute         run it again in a new session
exit codes:
  with --execute: 0 if all went as recorded, 3 at a divergence, 4 if the recording is too incomplete to say
"""

_GET_EXAMPLES = """\
examples:
  executor record list
  executor record get 3f2a                  writes 3f2a81….rxr
  executor record get 3f2a -o run.rxr && executor replay run.rxr
"""

_DIFF_EXAMPLES = """\
exit codes:
  0 without a difference, 3 with one, 4 without one if a recording is incomplete
"""

_RM_EXAMPLES = """\
examples:
  executor rm analysis 77b1 by name, or by the beginning of the id
  executor rm --all
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line. `command` is None in its result if none was given."""
    parser = Parser(
        prog="executor",
        description="Run Python in sandboxes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=executor_client.__version__)
    add_access(parser)
    parser.set_defaults(command=None, address=None, token=None, tls=False, tls_ca=None, tls_cert=None, tls_key=None)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    _add_run(commands)
    _add_repl(commands)
    process_arguments.add_commands(commands)
    _add_ls(commands)
    _add_cp(commands)
    _add_rm(commands)
    _add_rename(commands)
    add_json(make_command(commands, "policy", "show what the policy allows"))
    completion = make_command(commands, "completion", "print the completion script of a shell")
    completion.add_argument("shell", nargs="?", choices=SHELLS, default="bash", help="default: bash, and zsh as well")
    completion.epilog = 'bash, zsh:  eval "$(executor completion)"\nfish:       executor completion fish | source'
    top = make_command(commands, "top", "watch the daemon's sessions", _TOP_EXAMPLES)
    top.add_argument("--tenant", default="", metavar="NAME", help="only this tenant's sessions")
    _add_approvals(commands)
    _add_env(commands)
    _add_replay(commands)
    _add_record(commands)
    _add_mcp(commands)
    _add_jupyter(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = make_command(commands, "run", "run a program and show its output as it arrives", _RUN_EXAMPLES)
    run.allow_abbrev = False  # an abbreviation could match an option of the script
    rest = argparse.REMAINDER
    run.add_argument("-c", dest="code", metavar="CODE", nargs=rest, help="the program itself, instead of a file")
    run.add_argument("program", metavar="FILE", nargs=rest, help="a Python file or a notebook; - for standard input")
    run.add_argument(
        "--put",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="a file or directory to copy into the sandbox, in addition to Python files of the script's directory and "
        "files among its arguments; can be repeated",
    )
    run.add_argument(
        "--get-artifacts",
        type=Path,
        metavar="DIR",
        help="save the files that the program created or changed here; overwrites",
    )
    run.add_argument("--record", type=Path, metavar="FILE", help="record the run in this file; overwrites")
    add_output_options(run)
    _add_session_options(run)


def _add_repl(commands: Any) -> None:
    repl = make_command(commands, "repl", "run an interactive Python in a sandbox", _REPL_EXAMPLES)
    add_output_options(repl)
    _add_session_options(repl)


def _add_ls(commands: Any) -> None:
    ls = make_command(commands, "ls", "list the files of a session's workspace", _LS_EXAMPLES)
    ls.add_argument("place", metavar="SESSION[:PATH]", help=SESSION_HELP)
    add_json(ls)


def _add_cp(commands: Any) -> None:
    cp = make_command(commands, "cp", "copy a file or a directory from or to a session's workspace")
    cp.add_argument("source", metavar="SRC", help="a local path, or SESSION:PATH")
    cp.add_argument("target", metavar="DST", help="SESSION:PATH, or a local path")


def _add_rm(commands: Any) -> None:
    rm = make_command(commands, "rm", "end sessions, with their variables and files", _RM_EXAMPLES)
    rm.add_argument("sessions", metavar="SESSION", nargs="*", help=SESSION_HELP)
    rm.add_argument("--all", action="store_true", help="all your sessions")


def _add_rename(commands: Any) -> None:
    rename = make_command(commands, "rename", "name or rename a session")
    rename.add_argument("session", metavar="SESSION", help=SESSION_HELP)
    rename.add_argument("name", metavar="NAME", help="unique among your sessions; '' removes the name")


def _add_approvals(commands: Any) -> None:
    approvals = make_command(
        commands, "approvals", "decide requests that the policy leaves to a person", _APPROVALS_EXAMPLES
    )
    approvals.add_argument("--json", action="store_true", help="print each request as a line of JSON; do not ask")
    actions = approvals.add_subparsers(metavar="ACTION", parser_class=Parser)
    for name, decision, summary in (("approve", "once", "approve a request"), ("deny", "deny", "deny a request")):
        action = make_command(actions, name, summary)
        action.set_defaults(command="approvals decide", decision=decision)
        action.add_argument("approval_id", metavar="ID", help="as `executor approvals --json` prints it")
        if name == "approve":
            action.add_argument(
                "--session",
                dest="decision",
                action="store_const",
                const="session",
                help="approve equal requests of the same session, too",
            )


def _add_env(commands: Any) -> None:
    env = make_command(commands, "env", "build package environments ahead of time", _ENV_EXAMPLES)
    actions = env.add_subparsers(metavar="ACTION", parser_class=Parser, required=True)
    build = actions.add_parser(
        "build",
        help="build an environment and wait for it",
        description="Build a package environment and wait for it.",
        epilog=_ENV_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.set_defaults(command="env build")
    add_access(build, is_shown=False)
    build.add_argument(
        "files", metavar="FILE", nargs="*", help="requirements.txt, pylock.toml, a script, or - for stdin"
    )
    add_packages(build)
    build.add_argument("--image", help="the image to build for (default: the policy's)")
    build.add_argument("--backend", help="the backend to build for (default: the policy's first)")


def _add_replay(commands: Any) -> None:
    replay = make_command(commands, "replay", "show a recording of a session, or run it again", _REPLAY_EXAMPLES)
    replay.add_argument("recording", type=Path, metavar="FILE", help="a recording (session.record), such as run.rxr")
    replay.add_argument(
        "--speed",
        type=speed,
        metavar="N",
        help="play at N times the speed of the session, without its long pauses (default: print everything at once)",
    )
    replay.add_argument("--cast", type=Path, metavar="OUT", help="write an asciicast, for players of terminal sessions")
    replay.add_argument("--html", type=Path, metavar="OUT", help="write one HTML file")
    replay.add_argument(
        "--execute",
        action="store_true",
        help="run it again in a new session, with the recorded answers of the tools, up to the first divergence",
    )
    replay.add_argument("--image", help="for --execute: another image (default: the recorded one)")
    replay.add_argument(
        "--from-step", type=positive, metavar="N", help="for --execute: run the steps before N without comparing them"
    )
    replay.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="TEXT",
        help="for --execute: do not compare the output of commands that contain this text (repeatable)",
    )


def _add_record(commands: Any) -> None:
    record = make_command(commands, "record", "work with recordings of sessions")
    actions = record.add_subparsers(metavar="ACTION", parser_class=Parser, required=True)
    listed = make_command(actions, "list", "list the recordings that the daemon made of your sessions")
    listed.set_defaults(command="record list")
    listed.add_argument("--json", action="store_true", help="print them as JSON")
    got = make_command(actions, "get", "get the recording that the daemon made of a session", _GET_EXAMPLES)
    got.set_defaults(command="record get")
    got.add_argument("session", metavar="SESSION", help="the id of the session, or its beginning")
    got.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it (default: SESSION.rxr)")
    diff = make_command(actions, "diff", "compare two recordings step by step", _DIFF_EXAMPLES)
    diff.set_defaults(command="record diff")
    diff.add_argument("before", type=Path, metavar="A", help="a recording")
    diff.add_argument("after", type=Path, metavar="B", help="another one")


def _add_mcp(commands: Any) -> None:
    mcp = make_command(commands, "mcp", "serve sandboxed Python to MCP hosts, over stdin and stdout or HTTP")
    mcp.description = (
        "Serve sandboxed Python to an MCP host (an assistant, an editor, an agent), which starts this command and\n"
        "talks to it over stdin and stdout; or, with --http, to any number of hosts with tokens of the daemon.\n"
        "docs/mcp.md shows the entries for a host's configuration."
    )
    mcp.add_argument("--image", help="the sandboxes' image (default: the policy's)")
    add_imports(mcp, "--authorized-imports")
    add_packages(mcp)
    add_network(mcp)
    add_limits(mcp)
    mcp.add_argument(
        "--max-sessions",
        type=positive,
        default=4,
        metavar="N",
        help="how many sessions the host may have at a time, over HTTP each tenant (default: %(default)s)",
    )
    mcp.add_argument("--http", type=listen_address, metavar="HOST:PORT", help="serve over HTTP at this address")
    mcp.add_argument("--public-url", metavar="URL", help="for --http: the URL that hosts use, if there is a proxy")
    mcp.add_argument("--http-cert", metavar="FILE", help="for --http: the server's TLS certificate (PEM)")
    mcp.add_argument("--http-key", metavar="FILE", help="for --http: its key (PEM)")
    mcp.add_argument(
        "--authorization-server", metavar="URL", help="for --http: the OAuth server where hosts get a token"
    )


def _add_jupyter(commands: Any) -> None:
    jupyter = make_command(commands, "jupyter", "run Jupyter's kernels in sandboxes")
    install = make_command(jupyter.add_subparsers(metavar="ACTION", required=True), "install", "write a kernelspec")
    install.set_defaults(command="jupyter")
    install.add_argument("--name", default="sandbox", help="the kernelspec's name (default: %(default)s)")
    install.add_argument("--display-name", help='the name that Jupyter shows (default: "Python (NAME)")')
    install.add_argument("--prefix", metavar="DIR", help="install below this directory, such as a virtual environment")
    install.add_argument("--forwarding", action="store_true", help="the kernel for images without ipykernel")
    install.add_argument("--image", help="the sandboxes' image (default: the policy's)")
    add_packages(install)
    add_network(install)
    add_limits(install)


def _add_session_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ask", action="store_true", help="decide here, in the terminal, what the policy leaves to a person"
    )
    add_imports(parser, default=None)
    add_packages(parser)
    add_network(parser)
    parser.add_argument("--image", help="the sandbox's image (default: the policy's)")
    add_node_labels(parser)
    add_limits(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="the same as --limit wall_time_s=S")
    parser.add_argument("--name", help="name of the new session, which is kept")
    parser.add_argument("--session", metavar="SESSION", help="continue in this session, which is kept: " + SESSION_HELP)
    parser.add_argument(
        "--mcp-config",
        type=Path,
        metavar="FILE",
        help="a JSON file with `mcpServers`, as hosts have it: the servers' tools are functions in the program",
    )
    parser.add_argument("--state", type=Path, metavar="FILE", help="start with the variables and files saved there")
    parser.add_argument("--save-state", type=Path, metavar="FILE", help="save variables and files there at the end")
