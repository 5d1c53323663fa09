"""A double of E2B's cloud on this host, for a person: prints what to set, and serves until it is interrupted.

    python -m tests.support.e2b [--port PORT] [--max-sandboxes N] [--faults RULE ...]

A RULE is a kind and settings, as in `--faults "status path=/v2/sandboxes status=503 times=2"`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from typing import Any

from tests.support.e2b import WHY_NOT, Double, Kind

_SETTINGS = {"path": str, "method": str, "skip": int, "times": int, "status": int, "retry_after_s": int}
_SETTINGS |= {"seconds": float, "at_byte": int}


async def serve(arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Double(port=arguments.port, max_sandboxes=arguments.max_sandboxes) as double:
        for kind, settings in arguments.faults:
            double.fault(kind, **settings)
        for name, value in double.environment.items():
            print(f"export {name}={shlex.quote(value)}", flush=True)  # noqa: T201
        print(f"# the key is also in {double.api_key_file}", flush=True)  # noqa: T201
        await stopped.wait()


def rule(text: str) -> tuple[Kind, dict[str, Any]]:
    """One fault, from the command line."""
    words = shlex.split(text)
    settings: dict[str, Any] = {}
    while words and "=" in words[-1]:
        name, _, value = words.pop().partition("=")
        if name not in _SETTINGS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(_SETTINGS)}")
        settings[name] = None if value == "always" else _SETTINGS[name](value)
    with contextlib.suppress(ValueError):
        return Kind(" ".join(words)), settings
    raise argparse.ArgumentTypeError(f"{' '.join(words)!r} is none of {', '.join(kind.value for kind in Kind)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.e2b", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="any that is free, unless given")
    parser.add_argument("--max-sandboxes", type=int, default=20, help="that may run at one time")
    parser.add_argument("--faults", type=rule, nargs="*", default=[], metavar="RULE", help="see above")
    arguments = parser.parse_args()
    if WHY_NOT is not None:
        sys.exit(WHY_NOT)
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
