"""Tries the E2B backend with pairs of E2B's two packages, against the double of its cloud: `make test-e2b-matrix`.

    python tools/e2b_matrix.py [E2B+INTERPRETER ...] [--pytest='ARGS'] [--write | --check]

Two suites for each pair: what the SDK itself does against the double, in which an older one lacks what came later, and
our backend. matrix_runs.py says where environments and logs are. `--write` puts the table of the pairs that were run
into docs/backends.md; those that were not run keep their line. Fails when the pinned pair fails. `--check` runs
nothing, and fails when the page, the pinned pair and the pairs that `check-host` takes for tried do not agree.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from matrix_runs import CACHE, ROOT, MatrixFailure, Ran, Trial, report
from pages import between_marks

from executor_server.backends.e2b.check import TRIED_PAIRS

PAIRS = ("2.63.0+2.11.5", "2.61.0+2.11.4", "2.45.1+2.9.2")
SUITES = {
    "sdk": ("tests/integration/test_e2b_double.py",),
    "backend": ("tests/integration/test_e2b_backend.py",),
}
PACKAGES = ("--editable", ".[server,smolagents,data,otel]", "--group", "dev")
SETTINGS = {"REQUIRED_BACKENDS": "local,e2b"}

TARGET = ROOT / "docs/backends.md"
BEGIN, END = "<!-- pairs: made by tools/e2b_matrix.py -->\n", "<!-- end of pairs -->\n"
_ALL = "all"
HEAD = "| `e2b` | `e2b-code-interpreter` | the SDK against the double | our backend |"


def trial(pair: str) -> Trial:
    base, _, interpreter = pair.partition("+")
    packages = (*PACKAGES, f"e2b=={base}", f"e2b-code-interpreter=={interpreter}")
    return Trial(f"e2b-{pair}", packages, {"e2b": base, "e2b-code-interpreter": interpreter})


def pinned() -> str:
    """The pair that our extra names."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["e2b"]
    versions = dict(line.split("==") for line in extra)
    return f"{versions['e2b']}+{versions['e2b-code-interpreter']}"


def rows_of(page: str) -> dict[str, str]:
    """The lines of the table that is there, by pair."""
    _, _, rest = page.partition(BEGIN)
    table, _, _ = rest.partition(END)
    found = re.findall(r"^\| (\S+) \| (\S+) \|.*$", table, re.MULTILINE)
    lines = {f"{base}+{interpreter}": "" for base, interpreter in found if base[0].isdigit()}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and f"{cells[1]}+{cells[2]}" in lines:
            lines[f"{cells[1]}+{cells[2]}"] = line
    return lines


def write(path: Path, every: Mapping[str, Mapping[str, Ran]]) -> None:
    lines = {**rows_of(path.read_text()), **{pair: _row(pair, runs) for pair, runs in every.items()}}
    ordered = sorted(lines, key=_order, reverse=True)
    table = [HEAD, "|---|---|---|---|", *(lines[pair] for pair in ordered)]
    path.write_text(between_marks(path, BEGIN, END, table))


def _order(pair: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", pair)]


def _row(pair: str, runs: Mapping[str, Ran]) -> str:
    base, _, interpreter = pair.partition("+")
    cells = [base, interpreter, *(_cell(runs[suite]) for suite in SUITES)]
    return f"| {' | '.join(cells)} |"


def _cell(ran: Ran) -> str:
    if ran.problem and not ran.passed:
        return "cannot be tried"
    whole = ran.passed + len(ran.failed)
    return f"{_ALL} {whole} tests pass" if not ran.failed else f"no: {ran.passed} of {whole} tests pass"


def check(path: Path) -> str:
    """Returns the disagreement between the page and the code; empty when they agree."""
    stated = {pair for pair, line in rows_of(path.read_text()).items() if line.split("|")[-2].strip().startswith(_ALL)}
    tried = {"+".join(pair) for pair in TRIED_PAIRS}
    if stated != tried:
        return f"{path.name} says that the backend works with {sorted(stated)}, and check-host with {sorted(tried)}"
    if pinned() not in tried:
        return f"{pinned()} is pinned, and was not tried"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="E2B+INTERPRETER", help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="further arguments for pytest, as one word")
    parser.add_argument("--write", action="store_true", help="put the table into docs/backends.md")
    parser.add_argument("--check", action="store_true", help="see that the table is what the code says")
    asked = parser.parse_args()
    if asked.check:
        sys.exit(check(TARGET) or 0)
    CACHE.mkdir(parents=True, exist_ok=True)
    every: dict[str, dict[str, Ran]] = {}
    for pair in asked.pairs:
        every[pair] = {}
        for suite, files in SUITES.items():
            print(f"e2b {pair}, {suite} ...", flush=True)
            every[pair][suite] = trial(pair).run(files, shlex.split(asked.pytest), SETTINGS, f"-{suite}")
    for suite in SUITES:
        report(suite, [runs[suite] for runs in every.values()])
    if asked.write:
        write(TARGET, every)
    good: Sequence[Ran] = [*every.get(pinned(), {}).values()]
    return 0 if all(ran.is_good for ran in good) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MatrixFailure as failure:
        sys.exit(str(failure))
