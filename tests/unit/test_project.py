"""Claims about the project as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import grimp
import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
DAEMON = ROOT / "executor_server"
GUEST = DAEMON / "guest"
CLIENT = ROOT / "client/executor_client"
WIRE = ROOT / "proto/executor_api"

# Modules that make objects or code from bytes.
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "runpy", "shelve", "yaml"}
STANDARD = sys.stdlib_module_names | {"_sha2"}  # `_sha2` since CPython 3.12
# Packages that a sandbox's image may have; guest and codec import them inside functions only.
OF_THE_IMAGE = {"IPython", "PIL", "cloudpickle", "matplotlib", "numpy", "pandas", "pytz", "pyarrow", "torch"}
# Runs beside sandboxes and not in them: in a process of the daemon, or in the root part of a machine in the cloud.
PROXY = GUEST / "egress"
OF_THE_PROXY = {"h11"}
SHARED = (
    "executor_api.values",
    "executor_api.displays",
    "executor_api.limits",
    "executor_api.strict_json",
    "executor_api.tar",
)
LOADED_BY_MATPLOTLIB = GUEST / "interpreter/mpl_backend.py"
# Compiles the source of the user's own tools to find the names it uses, and runs none of it.
LOOKS_INTO_TOOLS = CLIENT / "_shipping"


def _sources(*roots: Path) -> list[Path]:
    return [
        path for root in roots for path in sorted(root.rglob("*.py")) if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _named(node: ast.AST) -> list[str]:
    """Returns the absolute names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []


@cache
def _imported(path: Path) -> list[str]:
    """Returns the absolute names that a file imports, anywhere in it."""
    return [name for node in ast.walk(_tree(path)) for name in _named(node)]


@pytest.fixture(scope="module")
def parsed() -> None:
    """Keeps the tests that parse all sources in one worker, where each file is parsed once."""


def _imported_at_import(path: Path) -> Iterator[str]:
    """Yields the names that importing the file imports: outside functions and `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [_tree(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from _named(node)
        pending.extend(ast.iter_child_nodes(node))


def test_importing_the_client_loads_neither_daemon_nor_smolagents_nor_what_only_some_calls_need() -> None:
    program = "import sys, executor_client; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    unwanted = {"executor_server", "smolagents", "cloudpickle", "PIL", "numpy", "pandas", "pydantic", "click", "rich"}
    assert unwanted.isdisjoint(name.partition(".")[0] for name in loaded)


@pytest.mark.usefixtures("parsed")
def test_guest_needs_the_standard_library_only() -> None:
    for path in _sources(GUEST, WIRE / "values"):
        at_import = () if path == LOADED_BY_MATPLOTLIB else _imported_at_import(path)
        standard = STANDARD | OF_THE_PROXY if path.parent == PROXY else STANDARD
        for name in at_import:
            top = name.partition(".")[0]
            assert top in standard or name.startswith(SHARED), (path, name)
        for name in _imported(path):
            top = name.partition(".")[0]
            assert top in standard | OF_THE_IMAGE or name.startswith(SHARED), (path, name)


def test_daemon_reaches_no_unpickler_through_the_guest() -> None:
    graph = grimp.build_graph("executor_server", "executor_api", include_external_packages=True, cache_dir=None)
    daemon = {name for name in graph.modules if name.startswith("executor_server") and ".guest" not in name}
    for name in sorted(daemon):
        for unpickler in sorted(UNPICKLERS & graph.modules):
            assert graph.find_shortest_chain(name, unpickler) is None, (name, unpickler)


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("root", [DAEMON, CLIENT, WIRE], ids=["daemon", "client", "wire"])
def test_nothing_outside_the_sandbox_makes_code_of_text(root: Path) -> None:
    for path in _sources(root):
        if GUEST in path.parents:
            continue
        calls = (node.func for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))
        names = {func.id for func in calls if isinstance(func, ast.Name)}
        compiling = {"compile"} if LOOKS_INTO_TOOLS not in path.parents else set()
        assert names.isdisjoint({"eval", "exec", "__import__"} | compiling), path


def test_every_rpc_says_what_it_refuses_or_what_repeating_it_does() -> None:
    proto = (WIRE / "v1/executor_service.proto").read_text()
    documented = re.findall(r"((?:^  //[^\n]*\n)+)^  rpc (\w+)\(", proto, re.MULTILINE)
    assert len(documented) == len(re.findall(r"^  rpc ", proto, re.MULTILINE))
    for comment, name in documented:
        assert re.search(r"[A-Z]+_[A-Z]+|[Rr]epeat", comment), name


def test_wheel_carries_three_packages_their_types_the_wire_and_the_guests_sources(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in ("executor_server", "executor_client", "executor_api"):
        assert f"{package}/py.typed" in names
    assert {"executor_api/v1/executor_service.proto", "executor_api/v1/executor_service_pb2_grpc.py"} <= names
    assert {f"executor_server/guest/{path.relative_to(GUEST)}" for path in _sources(GUEST)} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples")) or name.endswith(".pyc")]


def _python_of(page: Path) -> list[ast.Module]:
    return [
        ast.parse(block) for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_what_a_page_imports_exists(page: Path) -> None:
    for tree in _python_of(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("executor_"):
                module = import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_both_command_lines_know_their_version() -> None:
    version = metadata.version("remote-executor")
    for module in ("executor_server.daemon.cli", "executor_client.cli"):
        program = f"import sys, {module} as cli; sys.argv = ['x', '--version']; cli.main()"
        assert version in subprocess.check_output([sys.executable, "-c", program], text=True)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("executor_client.cli run -c 1", "executor_client.cli.arguments"),
        ("executor_client.cli run -c 1", "executor_client.cli.commands"),
        ("executor_server serve", "executor_server.daemon.cli"),
        ("executor_server serve", "executor_server.daemon.daemon"),
        ("executor_server token list", "executor_server.daemon.cli.token"),
    ],
)
def test_a_command_line_that_is_interrupted_while_it_imports_ends_quietly(command: str, module: str) -> None:
    program = f"""
import runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
package, *sys.argv[1:] = {command.split()}
runpy.run_module(package, run_name="__main__", alter_sys=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_clients_public_names_are_imported_when_asked_for() -> None:
    import executor_client

    assert set(executor_client._MODULE_OF) == set(executor_client.__all__)
    for name, module in executor_client._MODULE_OF.items():
        assert getattr(executor_client, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        executor_client.Nothing  # noqa: B018


# Imported by their modules: each keeps an SDK to itself or is loaded only where it is configured, or serves the command
# line, which loads as little as it can.
BY_MODULE = (
    "fleet.api",
    "fleet.daemons",
    "telemetry.tracing",
    "backends.local.fork_server",
    "policy.explain",
    "daemon.cli.image_building",
    "fleet.ray.commands",
    "fleet.ray.layout",
    "api.assembly",
    "backends.open_files",
    "core.lifecycle.signals",
    "core.lifecycle.announcement",
    "gateway.",
    "console.",
)
PACKAGES = sorted(str(path.parent.relative_to(DAEMON)).replace("/", ".") for path in DAEMON.glob("**/__init__.py"))[1:]


def test_daemons_root_holds_packages_only() -> None:
    assert {path.name for path in DAEMON.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("package", [name for name in PACKAGES if not name.startswith("guest.")])
def test_a_package_is_imported_by_its_public_names(package: str) -> None:
    """No module outside of a package names a module inside it, and its `__init__` says what it is for."""
    own = DAEMON / package.replace(".", "/")
    assert len((ast.get_docstring(_tree(own / "__init__.py")) or "").splitlines()) >= 1
    if package == "guest":  # it exports nothing: a re-export would be an import at each sandbox's start
        return
    for path in _sources(DAEMON):
        if own in path.parents or GUEST in path.parents:
            continue
        if package == "api" and DAEMON / "fleet/api" in path.parents:  # its services are of the same kind
            continue
        for name in _imported(path):
            inner = name.removeprefix("executor_server.")
            if inner.startswith(f"{package}.") and inner not in PACKAGES and not inner.startswith(BY_MODULE):
                pytest.fail(f"{path.relative_to(ROOT)} imports {name}; import the name from executor_server.{package}")


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("package", ["_aio", "_sync"])
def test_a_half_of_the_client_is_imported_by_its_public_names(package: str) -> None:
    """`_core` exports its modules instead: some of them cost an import of gRPC, which `executor --help` must not pay."""
    for path in _sources(CLIENT):
        if CLIENT / package not in path.parents:
            inner = [name for name in _imported(path) if name.startswith(f"executor_client.{package}.")]
            assert not inner, path
