"""`executor`: runs Python in sandboxes from a shell: files, an interactive interpreter, sessions and their files.

Owns the command line and its output. It must not know gRPC or the wire: it works through `ExecutorClient`, as any
program could. Modules that need gRPC are imported when a command runs, so that `--help` and a wrong option answer at
once. Our other modules are imported by `main`, which ends quietly if it is interrupted meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

EXIT_SUCCEEDED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0: success; 1: the program failed; 2: the command could not run; 130: interrupted; 143: ended by SIGTERM. If a
    program exits with its own code, that code is returned.
    """
    try:
        try:
            return _parse_and_run(arguments)
        finally:
            # At exit it could only fail with a traceback: `--help` is still in the buffer.
            if sys.stdout is not None and not sys.stdout.closed:  # `executor mcp` closes it
                sys.stdout.flush()
    except KeyboardInterrupt:  # while modules were imported: nothing has begun
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone (`| head`)
        _discard_output()
        return EXIT_FAILED
    except OSError as error:
        from executor_client.cli.console import disk_advice

        if not (advice := disk_advice(error)):
            raise
        _discard_output()
        print(f"executor: {error.filename or 'the output'} can't be written: {error.strerror}{advice}", file=sys.stderr)
        return EXIT_REFUSED


def _parse_and_run(arguments: Sequence[str] | None) -> int:
    from executor_client.cli.arguments import make_parser

    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_REFUSED
    return _run(options)


def _discard_output() -> None:
    """Lets Python's flush at exit succeed, after a write that failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    from executor_client.cli import commands
    from executor_client.cli.console import Console
    from executor_client.errors import ExecutorClientError

    console = Console(image_dir=getattr(options, "save_images", None), raw=getattr(options, "raw", False))
    try:
        with _ending_on_signals():
            return commands.run(options, console)
    except KeyboardInterrupt:
        console.fail("interrupted")
        return EXIT_INTERRUPTED
    except ExecutorClientError as error:
        console.fail(error.message)
        return EXIT_REFUSED
    finally:
        console.end_wait()


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exit, so that sessions end first. A second signal kills this process at once."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is signal.SIG_DFL  # `nohup` ignores SIGHUP
    ]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
