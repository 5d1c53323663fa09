"""The proofs of the contract's tests, by their marks: pytest itself collects them, in a process of its own.

    python -m pytest -p tests.contract.proofs --proofs=FILE --collect-only tests/contract

writes a JSON list into the file; `collected` does that and reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.contract.marks import Proof, proof_of

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proofs", help="the file into which the proofs are written")


def pytest_collection_finish(session: pytest.Session) -> None:
    target = session.config.getoption("--proofs")
    if target:
        found = [proof_of(item) for item in session.items if isinstance(item, pytest.Function)]
        Path(target).write_text(json.dumps([asdict(proof) for proof in found if proof is not None]))


def collected() -> list[Proof]:
    """Returns all proofs. Raises CalledProcessError, with pytest's output, when a test can't be collected."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "proofs.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.contract.proofs", f"--proofs={target}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [*command, "--collect-only", "-q", "tests/contract"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout[-4000:], done.stderr[-4000:])
        proofs = json.loads(target.read_text())
    return [Proof(each["test"], each["backend"], tuple(each["promise_ids"]), each["instead"]) for each in proofs]
