"""`executor replay` and `executor record`: shows recordings, runs them again, compares two, and gets the daemon's."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

from executor_client._core.local import NewFile
from executor_client._core.terminal import aligned
from executor_client.cli.console import Console, disk_advice
from executor_client.client import ExecutorClient
from executor_client.errors import InvalidRequest
from executor_client.recording import Recording, Step
from executor_client.replays.again import execute_again
from executor_client.replays.commands import commands_of
from executor_client.replays.comparison import Difference, difference, differing
from executor_client.replays.page import page_pieces
from executor_client.replays.steps import calls_of
from executor_client.replays.timeline import answer_text, command_text, completeness, frames, lacking, moment_text
from executor_client.replays.transcript import PAUSE_S_MAX, cast_lines, pieces
from executor_client.results import RecordingInfo

EXIT_SAME = 0
EXIT_DIVERGED = 3
EXIT_UNVERIFIED = 4

_HEADER = ("SESSION", "TENANT", "MODE", "BEGUN", "SIZE", "ENDED")
_PRIVATE = 0o600  # as the recording


def replay(options: argparse.Namespace, console: Console) -> int:
    """Shows a recording in the terminal, or writes it as an asciicast or as HTML. Raises ExecutorClientError."""
    if options.image is not None or options.from_step is not None or options.ignore:
        raise InvalidRequest("--image, --from-step and --ignore are for --execute, which runs the recording again")
    try:
        with Recording(options.recording) as recording:
            first = next(recording.entries(), None)
            begin_s, title = (0.0 if first is None else first.time_s), recording.path.name
            if options.cast is not None:
                _write(options.cast, cast_lines(title, begin_s, frames(recording)))
            if options.html is not None:
                about = f"Recorded {moment_text(begin_s)}. {completeness(recording.manifest)}"
                _write(options.html, page_pieces(title, about, frames(recording)))
            if options.cast is None and options.html is None:
                _show(recording, options.speed, console)
    except OSError as error:
        raise InvalidRequest(f"{options.recording} can't be replayed: {error}") from error
    return EXIT_SAME


def _write(path: Path, texts: Iterable[str]) -> None:
    try:
        with NewFile(path, mode=_PRIVATE) as file:
            for text in texts:
                file.write(text.encode())
            file.commit()
    except OSError as error:
        raise InvalidRequest(f"{path} can't be written: {error.strerror}{disk_advice(error)}") from error


def _show(recording: Recording, speed: float | None, console: Console) -> None:
    shown_s = 0.0
    for piece in pieces(frames(recording)):
        if speed is not None and piece.at_s > shown_s:
            time.sleep(min(piece.at_s - shown_s, PAUSE_S_MAX) / speed)
        shown_s = piece.at_s
        console.show_styled(piece.text, piece.style)
    console.remark(completeness(recording.manifest))


def execute_recording(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Runs a recording again. Raises ExecutorClientError."""

    if options.cast or options.html or options.speed:
        raise InvalidRequest("--cast, --html and --speed show a recording: use them without --execute")

    def show_step(number: int, how: str) -> None:
        console.end_wait()
        console.show_lines([f"step {number}: {how}"])

    try:
        with Recording(options.recording) as recording:
            replayed = execute_again(
                client,
                recording,
                image=options.image,
                from_step=options.from_step or 1,
                ignore=options.ignore,
                on_step=show_step,
            )
    except OSError as error:
        raise InvalidRequest(f"{options.recording} can't be replayed: {error}") from error
    console.end_wait()
    if replayed.divergence is not None:
        console.show_lines(["diverged", *replayed.divergence.lines()])
    elif replayed.unverified:
        console.show_lines(["unverified"])
    for note in replayed.notes:
        console.show_lines(["note, no divergence:", *note.lines()])
    console.show_lines([f"  not verified: {each}" for each in replayed.unverified])
    if replayed.divergence is not None or replayed.unverified:
        return EXIT_UNVERIFIED if replayed.divergence is None else EXIT_DIVERGED
    commands = f" and {replayed.commands} commands" if replayed.commands else ""
    console.show_lines([f"verified: all {replayed.steps} steps{commands} went as recorded"])
    return EXIT_SAME


def list_all(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Lists the recordings that the daemon made. Raises ExecutorClientError."""
    found = client.list_recordings()
    if options.json:
        console.show_json(found)
    else:
        console.show_lines(aligned([_HEADER, *map(_row, found)]))
    return EXIT_SAME


def _row(info: RecordingInfo) -> tuple[str, ...]:
    ended = "goes on" if info.end_time is None else f"{info.end_time.astimezone():%Y-%m-%d %H:%M}"
    if info.ended:
        ended = f"{ended} (incomplete: {info.ended})"
    begun = f"{info.create_time.astimezone():%Y-%m-%d %H:%M}"
    return (info.session_id, info.tenant, info.mode, begun, f"{info.size_bytes:,} B", ended)


def get(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Gets the recording that the daemon made of a session. Raises ExecutorClientError."""
    names = [each.session_id for each in client.list_recordings() if each.session_id.startswith(options.session)]
    if len(names) != 1:
        found = f"{len(names)} recordings of sessions begin" if names else "no recording of a session begins"
        advice = "give more of the id" if names else "`executor record list` lists them"
        raise InvalidRequest(f"{found} with {options.session!r}; {advice}")
    path = options.output or Path(f"{names[0]}.rxr")
    try:
        client.get_recording(names[0], path)
    except OSError as error:
        raise InvalidRequest(f"{path} can't be written: {error.strerror or error}{disk_advice(error)}") from error
    console.remark(f"written to {path}")
    return EXIT_SAME


def diff(options: argparse.Namespace, console: Console) -> int:
    """Compares two recordings step by step: code, tool calls, results. Raises ExecutorClientError."""
    try:
        with Recording(options.before) as before, Recording(options.after) as after:
            return _diff(before, after, console)
    except OSError as error:
        raise InvalidRequest(f"the recordings can't be compared: {error}") from error


def _diff(before: Recording, after: Recording, console: Console) -> int:
    differences, missing = 0, {*lacking(before.manifest), *lacking(after.manifest)}
    old, new = ((item for item in each.in_order() if isinstance(item, Step)) for each in (before, after))
    for number, (one, other) in enumerate(itertools.zip_longest(old, new), 1):
        found = _step_difference(number, before, after, one, other)
        if found is not None:
            differences += 1
            console.show_lines(found.lines())
    commands = itertools.zip_longest(commands_of(before), commands_of(after))
    for number, (command, again) in enumerate(commands, 1):
        texts = [None if each is None else command_text(each.request) for each in (command, again)]
        found = differing(0, f"command {number}", *texts)
        if found is None and command is not None and again is not None:
            found = next(command.differences(number, again), None)
            if command.is_cut or again.is_cut:
                missing.add(f"output of command {number}, of which some was left out")
        if found is not None:
            differences += 1
            console.show_lines(found.lines())
    if differences:
        console.show_lines([f"{differences} steps or commands differ"])
        return EXIT_DIVERGED
    if missing:
        console.show_lines(
            ["no difference, but unverified", *(f"  a recording lacks {each}" for each in sorted(missing))]
        )
        return EXIT_UNVERIFIED
    console.show_lines(["no difference"])
    return EXIT_SAME


def _step_difference(
    number: int, before: Recording, after: Recording, old: Step | None, new: Step | None
) -> Difference | None:
    if old is None or new is None:
        code = [None if step is None else step.request.code for step in (old, new)]
        return differing(number, "the code", *code)
    if (found := differing(number, "the code", old.request.code, new.request.code)) is not None:
        return found
    calls = itertools.zip_longest(calls_of(before, old), calls_of(after, new))
    for at, (one, other) in enumerate(calls, 1):
        if one is None or other is None or not one.is_like(other):
            return Difference(number, f"tool call {at}", str(one or "no call"), str(other or "no call"))
        answers = (answer_text(before, one.answer), answer_text(after, other.answer))
        if (found := differing(number, f"the answer to tool call {at}", *answers)) is not None:
            return found
    expected, got = before.result(old), after.result(new)
    if expected is None or got is None:
        outcomes = [None if each is None else each.outcome.value for each in (expected, got)]
        return differing(number, "the outcome", *outcomes)
    return difference(number, expected, got)
