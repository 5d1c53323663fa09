"""The parser of each command, options shared by several commands, and parsers of their values."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

_ACCESS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--address", "the daemon: host:port or unix:PATH (default: this user's own)", {}),
    ("--token", "the daemon's token (EXECUTOR_TOKEN is safer: other users can't see it)", {}),
    ("--tls", "use TLS; implied by the --tls options below", {"action": "store_true"}),
    ("--tls-ca", "CA file (default: the system's CAs)", {"type": Path, "metavar": "FILE"}),
    ("--tls-cert", "client certificate; can replace the token", {"type": Path, "metavar": "FILE"}),
    ("--tls-key", "key of the client certificate", {"type": Path, "metavar": "FILE"}),
)

SESSION_HELP = "its name, its id, or the beginning of its id"


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors point to `--help`.

    With `takes_argv`, the result's `argv` has the arguments after the first `--`; None without a `--`.
    """

    takes_argv = False

    def parse_known_args(self, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        given: list[str] = list(args) if args is not None else sys.argv[1:]
        if not self.takes_argv:
            return super().parse_known_args(given, namespace, **more)
        end = given.index("--") if "--" in given else len(given)
        found, rest = super().parse_known_args(given[:end], namespace, **more)
        found.argv = given[end + 1 :] if end < len(given) else None
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry: {self.prog} --help\n")


def make_command(commands: Any, name: str, summary: str, examples: str = "") -> Parser:
    """Adds a command; its parser's result has `command` set to the name."""
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=name)
    add_access(parser, is_shown=False)
    return parser


def add_access(parser: argparse.ArgumentParser, *, is_shown: bool = True) -> None:
    """Adds the options that select the daemon. They may also follow a command, whose help omits them."""
    for name, text, more in _ACCESS:
        parser.add_argument(name, help=text if is_shown else argparse.SUPPRESS, default=argparse.SUPPRESS, **more)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save-images", type=Path, metavar="DIR", help="save displayed images and figures here")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="print control characters unfiltered",
    )


def add_imports(parser: argparse.ArgumentParser, *more_names: str, default: tuple[str, ...] | None = ()) -> None:
    """A default of None means all imports that the policy allows, for a person. A model only gets the listed ones."""
    parser.add_argument(
        "--imports",
        *more_names,
        dest="imports",
        type=names,
        default=default,
        metavar="A,B",
        help="modules to authorize: numpy.*,os.path" + " (default: all that the policy allows)" * (default is None),
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON, with every field")


def add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network",
        type=names,
        action="extend",
        default=[],
        metavar="HOST",
        help="a host to reach, such as pypi.org, pypi.org:443 or *.example.com; can be repeated",
    )


def add_packages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with",
        dest="packages",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package to install, such as polars or 'polars>=1'; can be repeated",
    )


def add_node_labels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node-label",
        dest="node_labels",
        type=label,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a label that the node of a fleet must have, such as zone=a; can be repeated",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        dest="limits",
        type=limit,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit of the session, such as wall_time_s=30 or memory_bytes=2GB; can be repeated",
    )


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def speed(text: str) -> float:
    factor = float(text)
    if not 0.01 <= factor <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed: use a number from 0.01 on, such as 2")
    return factor


def listen_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16) or (":" in host and not host.startswith("[")):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8899")
    return host.strip("[]"), int(port)


def label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in zone=a")
    return name, value


def limit(text: str) -> tuple[str, float | int | str]:
    """Parses a name and a number. Other values are left to the client, which knows the units."""
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in wall_time_s=30")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def variable(text: str) -> tuple[str, str]:
    """Parses an environment variable."""
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text.partition('=')[0]!r} is not NAME=VALUE, as in LANG=C.UTF-8")
    return name, value
