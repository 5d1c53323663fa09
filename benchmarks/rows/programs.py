"""The cost of counting operations, beside the same source in a plain CPython."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtMostTimes, Figure, Reference, in_turns, timed
from benchmarks.references import plain_python_ms
from benchmarks.rows.local_agent import run_locally

_ROUNDS = 7
_ITERATIONS = 10_000_000
_LOCAL_ITERATIONS = 20_000
_MIXED_SIZE = 2_500
_LOCAL_MIXED_SIZE = 1

_FOR = """
total = 0
for number in range({size}):
    total += number
"""

_WHILE = """
number = 0
while number < {size}:
    number += 1
"""

_MIXED = """
def tokens(text):
    return [word.strip('.,').lower() for word in text.split() if word]

def count(words):
    counts = {{}}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts

def mean(numbers):
    return sum(numbers) / len(numbers)

TEXT = 'The quick brown fox jumps over the lazy dog, and the dog sleeps. ' * 40
records = []
for number in range({size}):
    counts = count(tokens(TEXT))
    for name, seen in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        records.append({{'id': len(records), 'name': name.upper(), 'value': (seen * 7919 + number) % 1000}})
    parts = ','.join(f"{{record['name']}}={{record['value']:04d}}" for record in records[-500:])
    table = {{key: int(value) for key, value in (part.split('=') for part in parts.split(','))}}
    squares = [value * value for value in range(3000) if value % 3]
    by_name = {{}}
    for record in records[-1000:]:
        by_name.setdefault(record['name'], []).append(record['value'])
    means = {{name: mean(numbers) for name, numbers in by_name.items()}}
    ordered = sorted(squares, key=lambda value: -value)[:100] + sorted(means.values())
"""


def loops(bench: Bench) -> Iterator[Figure]:
    """Ten million turns of a loop that does as little as it can: the dearest case of counting."""
    for name, program in (("for", _FOR), ("while", _WHILE)):
        yield _beside_python(bench, f"{name} loop, 10^7", program, _ITERATIONS, AtMostTimes(1.5))
        yield _local(f"{name} loop, 10^7", program, _LOCAL_ITERATIONS, _ITERATIONS)


def mixed(bench: Bench) -> Iterator[Figure]:
    """Functions, comprehensions, strings, dicts and lists, as agents write them; about a second."""
    yield _beside_python(bench, "mixed program", _MIXED, _MIXED_SIZE, AtMostTimes(1.15))
    yield _local("mixed program", _MIXED, _LOCAL_MIXED_SIZE, _MIXED_SIZE)


def _beside_python(bench: Bench, name: str, program: str, size: int, aim: AtMostTimes) -> Figure:
    source = program.format(size=size)

    with bench.local.cold_session() as session:

        def ours() -> float:
            took = timed(lambda: results.append(session.execute(source)))
            assert results[-1].outcome.name == "SUCCEEDED", results[-1].error
            return took

        results = [session.execute("None")]
        ours_ms, python_ms = in_turns(_ROUNDS, ours, lambda: plain_python_ms(source), warm_up=1)
    return Figure(name, "ms", ours_ms, Reference("CPython", python_ms), aim, by_best=True)


def _local(name: str, program: str, small: int, size: int) -> Figure:
    """The same in smolagents' interpreter, on so much less that it ends, scaled to the same size."""
    scale = size / small
    small_source = program.format(size=small)
    local_ms, python_ms = in_turns(
        2, lambda: run_locally(small_source) * scale, lambda: plain_python_ms(program.format(size=size)), warm_up=0
    )
    return Figure(f"{name}, smolagents' local (scaled)", "ms", local_ms, Reference("CPython", python_ms), by_best=True)
