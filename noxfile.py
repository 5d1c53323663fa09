"""Runs tests with each version of the libraries that they are about: `make test-versions`.

    nox -l                                   lists them
    nox -s 'smolagents(1.22.0)' -- -x        one of them; arguments for pytest follow

Environments are in .cache/nox and import this checkout.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
WORKERS = str(3 * (os.cpu_count() or 1))  # as many as `make test` has
SMOLAGENTS = ("1.22.0", "1.23.0", "1.24.0", "1.25.0", "1.26.0")
# The oldest and the newest of each major version. Only version 1 works with mcpadapt, so with smolagents' MCP tools.
MCP = ("1.28.0", "1.30.0", "2.0.0", "2.3.0")
E2B = ("2.63.0+2.11.5", "2.61.0+2.11.4", "2.45.1+2.9.2")

INTEGRATIONS = tomllib.loads((ROOT / "tests/frameworks/integrations.toml").read_text())["integration"]
CLIENTS = tomllib.loads((ROOT / "tests/facades/clients.toml").read_text())["client"]
PLACES = {
    "local": {},
    "docker": {"EXECUTOR_TEST_BACKEND": "docker"},
    "front": {"EXECUTOR_TEST_FLEET": "1"},
}

nox.options.default_venv_backend = "uv"
nox.options.envdir = ".cache/nox"
nox.options.reuse_venv = "yes"


@nox.session(python=sys.executable)
@nox.parametrize("version", SMOLAGENTS, ids=SMOLAGENTS)
def smolagents(session: nox.Session, version: str) -> None:
    """The integration, on each smolagents that it is for."""
    _install(session, "server,smolagents,mcp,data,otel", "--group", "mcp-tools", f"smolagents=={version}")
    # Of the table of features only our own columns hold for every version.
    selection = ("-k", "not the_feature_is or ours_local")
    suite = ("tests/integration/test_smolagents*.py", "tests/integration/test_examples.py", "tests/features/test_*.py")
    _test(session, "local", *selection, suite=suite)


@nox.session(python=sys.executable)
@nox.parametrize("version", MCP, ids=MCP)
def mcp(session: nox.Session, version: str) -> None:
    """`executor mcp`, on versions 1 and 2 of the official SDK."""
    tools = ("--group", "mcp-tools") if version.startswith("1.") else ()
    _install(session, "server,smolagents,mcp,data,otel", *tools, f"mcp=={version}")
    suite = (
        "tests/integration/test_mcp*.py",
        "tests/integration/test_smolagents_mcp*.py",
        "tests/unit/client/test_mcp*.py",
    )
    _test(session, "local", suite=suite)


@nox.session(python=sys.executable)
@nox.parametrize("pair", E2B, ids=E2B)
def e2b(session: nox.Session, pair: str) -> None:
    """The E2B backend, with pairs of E2B's two packages. docs/backends.md has the results."""
    base, interpreter = pair.split("+")
    _install(session, "server,smolagents,data,otel", f"e2b=={base}", f"e2b-code-interpreter=={interpreter}")
    # Other pairs than the pinned one are tried to see whether they work.
    codes = [0] if pair == E2B[0] else [0, 1]
    _test(session, "local,e2b", suite=("tests/integration/test_e2b_backend.py",), codes=codes)


@nox.session(python=sys.executable)
@nox.parametrize(
    "entry",
    [
        nox.param(entry, id=f"{entry['extra']}-{entry['version']}", tags=["newest"] if entry.get("newest") else [])
        for entry in INTEGRATIONS
    ],
)
def integrations(session: nox.Session, entry: dict[str, Any]) -> None:
    """Each agent framework: its own suite, and our tests. PLACES=local,docker,front chooses what sandboxes run on.

    `nox -t newest` runs the newest version of each. At the end the table in docs/integrations.md is written.
    """
    name = entry["extra"].replace("-", "_")
    tests = ("aiohttp", "hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", *entry["beside"])
    packages = (f".[server,{entry['extra']}]", f"{entry['package']}=={entry['version']}", *tests)
    session.install("--editable", *packages, env={"UV_SYSTEM_CERTS": "1"})
    # Their own wheels' warnings are theirs, and pytest-asyncio is not for all of them.
    options = ("-o", "addopts=--import-mode=importlib -ra", "-o", "filterwarnings=", "-p", "no:cacheprovider")
    for place in os.environ.get("PLACES", ",".join(PLACES)).split(","):
        env = {"REQUIRED_BACKENDS": "docker" if place == "docker" else "local", **PLACES[place]}
        session.run("pytest", *options, f"tests/frameworks/test_{name}.py", *session.posargs, env=env)


@nox.session(python=sys.executable)
@nox.parametrize("client", [nox.param(each, id=each["id"], tags=each.get("tags", [])) for each in CLIENTS])
def facades(session: nox.Session, client: dict[str, Any]) -> None:
    """E2B's clients, each in an environment that has nothing of ours, against our gateway. See docs/e2b-protocol.md.

    `nox -t newest oldest` runs the newest and the oldest pair of E2B's packages.
    """
    program = f"tests/facades/{client['program']}"
    directory = session.virtualenv.location
    if program.endswith(".mjs"):
        session.run("npm", "install", "--silent", "--prefix", directory, *client["packages"], external=True)
        command = ("node", program)
    else:
        session.install(*client["packages"], env={"UV_SYSTEM_CERTS": "1"})
        command = (f"{directory}/bin/python", program)
    for form in client["forms"]:
        # The daemon and the gateway run in the environment that nox is from.
        gateway = (sys.executable, "-m", "tests.facades", "--form", form)
        session.run(*gateway, *command, *session.posargs, external=True, env={"NODE_PATH": f"{directory}/node_modules"})


def _install(session: nox.Session, extras: str, *packages: str) -> None:
    session.install("--editable", f".[{extras}]", "--group", "dev", *packages, env={"UV_SYSTEM_CERTS": "1"})


def _test(
    session: nox.Session, backends: str, *arguments: str, suite: tuple[str, ...], codes: Sequence[int] = (0,)
) -> None:
    files = [str(path.relative_to(ROOT)) for pattern in suite for path in sorted(ROOT.glob(pattern))]
    # A version that skips its tests has shown nothing. Without pytest's cache, which all versions would share.
    env = {"REQUIRED_BACKENDS": backends}
    options = ("-p", "no:cacheprovider", "-n", WORKERS)
    session.run("pytest", *options, *files, *arguments, *session.posargs, env=env, success_codes=codes)
