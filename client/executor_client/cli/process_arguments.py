"""The arguments of the commands for processes, terminals and ports of a session."""

from __future__ import annotations

import argparse
from typing import Any

from executor_client.cli.detach_keys import DETACH_KEYS, parse_keys
from executor_client.cli.options import (
    SESSION_HELP,
    add_imports,
    add_json,
    add_limits,
    add_network,
    add_node_labels,
    add_output_options,
    add_packages,
    make_command,
    variable,
)
from executor_client.cli.port_numbers import parse_forward

_SHELL_EXAMPLES = """\
examples:
  executor shell                            in a new sandbox, which ends with the shell
  executor shell --name analysis            in a new session with this name, which is kept
  executor shell analysis                   in an existing session
Ctrl-] detaches and leaves the shell running; `executor attach SESSION` reattaches. All other keys go to the shell.
"""

_EXEC_EXAMPLES = """\
examples:
  executor exec analysis -- pytest -q       run a command and return its exit code
  executor exec 3f2a -- sh -c 'ls | wc -l'
  tar c src | executor exec 3f2a -- tar x
  executor exec -t 3f2a -- top              with a terminal, like `executor shell`
  executor exec 3f2a 'len(rows)'            without --: run Python and print the value, as in the repl
  executor exec 3f2a - < step.py
"""

_ATTACH_EXAMPLES = """\
examples:
  executor attach 3f2a                      the only running process, or the only one with a terminal
  executor attach 3f2a 77b1                 this process; `executor ps 3f2a` lists them
Ctrl-] detaches from a terminal, Ctrl-C from a process without one; it continues. Earlier output is shown first.
"""


_FORWARD_EXAMPLES = """\
examples:
  executor port-forward analysis 8000       http://127.0.0.1:8000 to port 8000 of the session
  executor port-forward analysis 9000:8000  http://127.0.0.1:9000 to port 8000
  executor port-forward analysis :8000 :5432    choose free local ports, and print them
  executor port-forward analysis 0.0.0.0:9000:8000  reachable from other machines
"""


def add_commands(commands: Any) -> None:
    """Adds `shell`, `exec`, `attach`, `port-forward` and `ps`."""
    _add_shell(commands)
    _add_exec(commands)
    _add_attach(commands)
    _add_port_forward(commands)
    _add_ps(commands)


def _add_shell(commands: Any) -> None:
    shell = make_command(commands, "shell", "open a terminal in a session", _SHELL_EXAMPLES)
    shell.add_argument("session", metavar="SESSION", nargs="?", help=f"{SESSION_HELP} (default: a new session)")
    shell.add_argument("--name", help="name of the new session, which is kept")
    shell.add_argument("--shell", metavar="PATH", help="the program (default: bash, else sh)")
    _add_surroundings(shell)
    _add_detach_keys(shell)
    add_imports(shell)
    add_packages(shell)
    add_network(shell)
    shell.add_argument("--image", help="the new session's image (default: the policy's)")
    add_node_labels(shell)
    add_limits(shell)


def _add_exec(commands: Any) -> None:
    summary = "run a command, or Python code, in an existing session"
    execute = make_command(commands, "exec", summary, _EXEC_EXAMPLES)
    execute.takes_argv = True
    execute.usage = "%(prog)s [OPTIONS] SESSION (-- COMMAND [ARG...] | CODE)"
    execute.add_argument("session", metavar="SESSION", help=SESSION_HELP)
    execute.add_argument("code", metavar="CODE", nargs="?", help="Python, - for standard input")
    execute.add_argument("--timeout", type=float, metavar="S", help="time limit in seconds")
    execute.add_argument("-t", "--tty", action="store_true", help="run the command on this terminal")
    execute.add_argument("-d", "--detach", action="store_true", help="start the command, print its id, and return")
    execute.add_argument("-n", "--no-stdin", action="store_true", help="do not read standard input")
    _add_surroundings(execute)
    _add_detach_keys(execute)
    add_output_options(execute)


def _add_attach(commands: Any) -> None:
    attach = make_command(commands, "attach", "reattach to a process of a session", _ATTACH_EXAMPLES)
    attach.add_argument("session", metavar="SESSION", help=SESSION_HELP)
    attach.add_argument("process", metavar="PROCESS", nargs="?", help="its id, or the beginning of its id")
    _add_detach_keys(attach)
    attach.add_argument("--raw", action="store_true", help="print control characters unfiltered")


def _add_port_forward(commands: Any) -> None:
    summary = "forward local ports to ports of a session, until Ctrl-C"
    forward = make_command(commands, "port-forward", summary, _FORWARD_EXAMPLES)
    forward.add_argument("session", metavar="SESSION", help=SESSION_HELP)
    forward.add_argument(
        "ports", metavar="[[HOST:]PORT:]PORT", nargs="+", type=parse_forward, help="the local port, and the session's"
    )


def _add_ps(commands: Any) -> None:
    ps = make_command(commands, "ps", "list your sessions, or the processes of one")
    ps.add_argument("session", metavar="SESSION", nargs="?", help=f"list its processes: {SESSION_HELP}")
    ps.add_argument("--wide", action="store_true", help="all columns")
    ps.add_argument("--full", action="store_true", help="all columns, whole ids, nothing truncated")
    add_json(ps)
    ps.add_argument("-q", "--quiet", action="store_true", help="whole ids only, one a line")


def _add_surroundings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cwd", default="", metavar="DIR", help="working directory (default: the workspace)")
    parser.add_argument(
        "--env",
        dest="variables",
        type=variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable; can be repeated",
    )


def _add_detach_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detach-keys",
        type=_keys,
        default=parse_keys(DETACH_KEYS),
        metavar="KEYS",
        help=f"the keys that detach from a terminal, such as ctrl-p,ctrl-q, or none (default: {DETACH_KEYS})",
    )


def _keys(text: str) -> bytes:
    try:
        return parse_keys(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
