"""The cost of counting operations, compared with the same source in a plain CPython."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from benchmarks.references import plain_python_ms

_ROUNDS = 7
ITERATIONS = 10_000_000
MIXED_SIZE = 2_500

FOR = """
total = 0
for number in range({size}):
    total += number
"""

WHILE = """
number = 0
while number < {size}:
    number += 1
"""

MIXED = """
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
    """Ten million turns of a loop that does as little as it can: the most expensive case of counting."""
    for name, program in (("for", FOR), ("while", WHILE)):
        yield _beside_python(bench, f"{name} loop, 10^7", program, ITERATIONS, AtMostTimes(1.5))


def mixed(bench: Bench) -> Iterator[Figure]:
    """Functions, comprehensions, strings, dicts and lists, as agents write them; about a second."""
    yield _beside_python(bench, "mixed program", MIXED, MIXED_SIZE, AtMostTimes(1.15))


def _beside_python(bench: Bench, name: str, program: str, size: int, aim: AtMostTimes) -> Figure:
    source = program.format(size=max(1, round(size * bench.effort.programs)))

    with bench.local.cold_session() as session:

        def ours() -> float:
            took = timed(lambda: results.append(session.execute(source)))
            assert results[-1].outcome.name == "SUCCEEDED", results[-1].error
            return took

        results = [session.execute("None")]
        ours_ms, python_ms = bench.in_turns(_ROUNDS, ours, lambda: plain_python_ms(source), warm_up=1)
    return Figure(name, "ms", ours_ms, Reference("CPython", python_ms), aim, by_best=True)
