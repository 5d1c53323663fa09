"""A policy, requests of tenants, and the verdict on each: the table of tests/integration/test_policy_table.py.

A request is a `policy.explain.question.Question`, so that a daemon and `policy explain` are asked the same.
The daemon has the local backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor_client import Outcome

POLICY = """\
version = "table"

[profiles.common]
sandbox.images = ["base", "data"]
imports.denied = [
  "ctypes",
  "multiprocessing",
]

[profiles.common.limits.default]
wall_time_s = 90
cpu_time_s = 60.0
operations = 1_000_000

[profiles.common.limits.max]
wall_time_s = 120
cpu_time_s = 100
operations = 2_000_000
memory_bytes = 4_294_967_296
processes = 256
output_bytes = 2_000_000
disk_bytes = 2_147_483_648
idle_time_s = 3600
session_time_s = 30_000

[profiles.research]
extends = "common"
imports.allowed = ["numpy.*", "json", "os.path"]
limits.execution_max.wall_time_s = 60
tools.allowed = ["search", "web_*"]
files.max_put_bytes = 1000
files.max_puts = 2
files.max_gets = 1

[profiles.support]
extends = "common"
imports.default = ["math", "random", "os"]
imports.allowed = []
language.preset = "strict"
language.open = true
tools.placements = []
tools.allowed = []
sandbox.images = ["base"]

[profiles.support.limits]
default = { wall_time_s = 10, memory_bytes = 268_435_456 }
max.wall_time_s = 20
max.memory_bytes = 536_870_912

[profiles.far]
extends = "common"
sandbox.backends = ["docker"]

[tenants.research]
profile = "research"

[tenants.support]
profile = "support"

[tenants.far]
profile = "far"

[tenants.local]
profile = "common"
"""

Row = tuple[str, str, str, str, str]
"""A violation: field, kind, requested, allowed, and the rule, which is one of the tenant's profile unless it is whole."""


@dataclass(frozen=True)
class Case:
    """A tenant's request and the verdict: granted, refused with violations, or invalid."""

    name: str
    tenant: str
    asked: Mapping[str, Any]
    violations: tuple[Row, ...] = ()
    invalid: str = ""  # a part of the message of an invalid request
    outcome: Outcome | None = None  # outcome of code that makes use of the grant


CODE_OF_RULE = {
    "dunder_access": "().__class__",
    "dynamic_code": "eval('1 + 1')",
    "namespaces": "globals()",
    "foreign_modules": "print.__self__.len",
    "module_attributes": "import random\nrandom._random",
    "dangerous_functions": "import os\nos.system('true')",
    "open": "open('/dev/null').read()",
    "file_writing": "open('written', 'w').close()",
    "unlisted_builtins": "memoryview(b'x')",
}
"""Code that breaks each rule of the language, and is harmless where it may run."""


def _above(name: str, requested: str, allowed: str) -> Row:
    return f"limits.{name}", "ABOVE_CEILING", requested, f"at most {allowed}", f"limits.max.{name}"


def _import(requested: str, allowed: str = "numpy.*, json, os.path") -> Row:
    return "authorized_imports", "NOT_ALLOWED", requested, allowed, "imports.allowed"


def _denied(requested: str) -> Row:
    return "authorized_imports", "DENIED", requested, "nothing of ctypes, multiprocessing", "imports.denied"


def _limit_cases() -> list[Case]:
    ceilings: dict[str, tuple[float, float, str, str]] = {
        "wall_time_s": (120, 120.5, "120.5", "120"),
        "cpu_time_s": (100, 101, "101", "100"),
        "operations": (2_000_000, 2_000_001, "2,000,001", "2,000,000"),
        "memory_bytes": (4_294_967_296, 10**18, "1,000,000,000,000,000,000", "4,294,967,296"),
        "processes": (256, 257, "257", "256"),
        "output_bytes": (2_000_000, 2_000_001, "2,000,001", "2,000,000"),
        "disk_bytes": (2_147_483_648, 2_147_483_649, "2,147,483,649", "2,147,483,648"),
        "idle_time_s": (3600, 3601, "3,601", "3,600"),
        "session_time_s": (30_000, 30_001, "30,001", "30,000"),
        "max_files": (1_000_000, 1_000_001, "1,000,001", "1,000,000"),
        "session_operations": (10**15, 10**15 + 1, "1,000,000,000,000,001", "1,000,000,000,000,000"),
    }
    granted = [
        Case(f"{name} at its ceiling", "research", {"limits": {name: at}}) for name, (at, _, _, _) in ceilings.items()
    ]
    refused = [
        Case(f"{name} above its ceiling", "research", {"limits": {name: above}}, (_above(name, requested, allowed),))
        for name, (_, above, requested, allowed) in ceilings.items()
    ]
    return granted + refused


def _language_cases() -> list[Case]:
    permitted = {"research": set(CODE_OF_RULE) - {"foreign_modules"}, "support": {"open"}}
    return [
        Case(
            f"{rule} in {tenant}",
            tenant,
            {"language": [rule]},
            outcome=Outcome.SUCCEEDED if rule in permitted[tenant] else Outcome.POLICY_DENIED,
        )
        for tenant in ("research", "support")
        for rule in CODE_OF_RULE
        # os is not among the imports of research; for support another rule refuses the code first.
        if (tenant, rule) not in (("research", "dangerous_functions"), ("support", "foreign_modules"))
    ]


CASES = [
    Case("nothing special", "research", {}),
    Case("the first image", "research", {"image": "base"}),
    Case("another image", "research", {"image": "data"}),
    Case(
        "an image of others",
        "research",
        {"image": "web"},
        (("image", "NOT_ALLOWED", "web", "base, data", "sandbox.images"),),
    ),
    Case("an image of nobody", "research", {"image": "nothing"}, invalid="available: base, data"),
    Case("the daemon's backend", "research", {"backend": "local"}),
    Case(
        "a backend that the daemon has not",
        "research",
        {"backend": "docker"},
        (("backend", "UNSUPPORTED", "docker", "local", "server.backend"),),
    ),
    Case(
        "a backend of nobody",
        "research",
        {"backend": "e2b"},
        (("backend", "UNSUPPORTED", "e2b", "local", "server.backend"),),
    ),
    *_limit_cases(),
    Case("negative time", "research", {"limits": {"wall_time_s": -1}}, invalid="limits.wall_time_s must be a finite"),
    Case(
        "no number", "research", {"limits": {"cpu_time_s": float("nan")}}, invalid="limits.cpu_time_s must be a finite"
    ),
    Case("no operations", "research", {"limits": {"operations": 0}}, invalid="limits.operations must be a finite"),
    Case("too little memory", "research", {"limits": {"memory_bytes": 1000}}, invalid="it must be at least 33,554,432"),
    Case("a module", "research", {"authorized_imports": ["numpy"]}),
    Case("what is below a module", "research", {"authorized_imports": ["numpy.linalg.*"]}),
    Case("a parent of a module", "research", {"authorized_imports": ["os"]}),
    Case("a default, asked for", "research", {"authorized_imports": ["math"]}),
    Case("more than a module", "research", {"authorized_imports": ["os.*"]}, (_import("os.*"),)),
    Case("a look-alike", "research", {"authorized_imports": ["numpyx"]}, (_import("numpyx"),)),
    Case("everything", "research", {"authorized_imports": ["*"]}, (_import("*"),)),
    Case("what is denied", "research", {"authorized_imports": ["ctypes"]}, (_denied("ctypes"),)),
    Case("what is below it", "research", {"authorized_imports": ["ctypes.util"]}, (_denied("ctypes.util"),)),
    Case(
        "some of each",
        "research",
        {"authorized_imports": ["json", "torch", "multiprocessing.*", "numpy"]},
        (_import("torch"), _denied("multiprocessing.*")),
    ),
    Case("no module", "research", {"authorized_imports": ["os; import sys"]}, invalid="must be a dotted module name"),
    Case("too many modules", "research", {"authorized_imports": ["json"] * 1000}, invalid="has more than 256 patterns"),
    Case(
        "the network",
        "research",
        {"network": ["example.com", "*.example.org:8443"]},
        (
            ("network", "NOT_ALLOWED", "example.com", "none", "network.allowed"),
            ("network", "NOT_ALLOWED", "*.example.org:8443", "none", "network.allowed"),
        ),
    ),
    Case("no host", "research", {"network": ["10.0.0.0/8"]}, invalid="network[0]"),
    Case("too many hosts", "research", {"network": ["example.com"] * 100}, invalid="has more than 64 entries"),
    Case(
        "packages",
        "research",
        {"packages": ["requests"]},
        (("packages", "NOT_ALLOWED", "requests", "none", "packages.allowed"),),
    ),
    Case(
        "too much of everything",
        "research",
        {
            "image": "web",
            "backend": "e2b",
            "network": ["a.example"],
            "limits": {"wall_time_s": 121, "processes": 300},
            "authorized_imports": ["x"],
        },
        (
            ("backend", "UNSUPPORTED", "e2b", "local", "server.backend"),
            ("image", "NOT_ALLOWED", "web", "base, data", "sandbox.images"),
            ("network", "NOT_ALLOWED", "a.example", "none", "network.allowed"),
            _above("wall_time_s", "121", "120"),
            _above("processes", "300", "256"),
            _import("x"),
        ),
    ),
    # -- executions
    Case("an execution's ceiling", "research", {"execution": {"wall_time_s": 60, "operations": 10}}),
    Case(
        "more than an execution can have",
        "research",
        {"execution": {"wall_time_s": 61}},
        (("limits.wall_time_s", "ABOVE_CEILING", "61", "at most 60", "limits.execution_max.wall_time_s"),),
    ),
    Case(
        "more than the session has",
        "research",
        {"execution": {"operations": 1_000_001, "cpu_time_s": 61}},
        (
            ("limits.cpu_time_s", "ABOVE_CEILING", "61", "at most 60, as its session", "limits.default.cpu_time_s"),
            (
                "limits.operations",
                "ABOVE_CEILING",
                "1,000,001",
                "at most 1,000,000, as its session",
                "limits.default.operations",
            ),
        ),
    ),
    Case("as much as the session asked for", "research", {"limits": {"operations": 5}, "execution": {"operations": 5}}),
    Case(
        "more than the session asked for",
        "research",
        {"limits": {"operations": 5}, "execution": {"operations": 6}},
        (("limits.operations", "ABOVE_CEILING", "6", "at most 5, as its session", "limits.default.operations"),),
    ),
    Case("memory of an execution", "research", {"execution": {"memory_bytes": 10**9}}, invalid="can't be set for one"),
    # -- tools and files
    Case("tools by name and by beginning", "research", {"tools": ["search", "web_", "web_find"]}),
    Case(
        "other tools",
        "research",
        {"tools": ["searching", "search", "shell"]},
        (
            ("tools[0].name", "NOT_ALLOWED", "searching", "search, web_*", "tools.allowed"),
            ("tools[2].name", "NOT_ALLOWED", "shell", "search, web_*", "tools.allowed"),
        ),
    ),
    Case("tools that run in the sandbox", "research", {"tools": ["search"], "sandbox_tools": ["web_", "web_find"]}),
    Case(
        "other tools that run in the sandbox",
        "research",
        {"tools": ["search"], "sandbox_tools": ["web_", "shell"]},
        (("tools[2].name", "NOT_ALLOWED", "shell", "search, web_*", "tools.allowed"),),
    ),
    Case("the largest file", "research", {"put_file": {"size_bytes": 1000, "so_far": 1}}),
    Case(
        "a larger file",
        "research",
        {"put_file": {"size_bytes": 1001}},
        (("size_bytes", "ABOVE_CEILING", "1,001", "at most 1,000", "files.max_put_bytes"),),
    ),
    Case(
        "one file too many",
        "research",
        {"put_file": {"size_bytes": 1, "so_far": 2}},
        (("path", "ABOVE_CEILING", "3", "at most 2", "files.max_puts"),),
    ),
    Case("a file that is got", "research", {"get_file": {"size_bytes": 10}}),
    Case(
        "one file too many that is got",
        "research",
        {"get_file": {"so_far": 1}},
        (("path", "ABOVE_CEILING", "2", "at most 1", "files.max_gets"),),
    ),
    # -- what code does
    Case("a default module", "research", {"imports": ["math"]}, outcome=Outcome.SUCCEEDED),
    Case("a module not asked for", "research", {"imports": ["json"]}, outcome=Outcome.IMPORT_DENIED),
    Case(
        "a module asked for",
        "research",
        {"authorized_imports": ["numpy.*", "os.path"], "imports": ["numpy.linalg", "os.path", "os"]},
        outcome=Outcome.SUCCEEDED,
    ),
    Case(
        "a module beside one asked for",
        "research",
        {"authorized_imports": ["numpy"], "imports": ["numpy.linalg"]},
        outcome=Outcome.IMPORT_DENIED,
    ),
    Case("a denied module", "research", {"imports": ["ctypes"]}, outcome=Outcome.IMPORT_DENIED),
    Case("a default of others", "support", {"imports": ["datetime"]}, outcome=Outcome.IMPORT_DENIED),
    Case("its own defaults", "support", {"imports": ["math", "os", "random"]}, outcome=Outcome.SUCCEEDED),
    *_language_cases(),
    # -- the other tenant
    Case("nothing special, of the other", "support", {}),
    Case(
        "the other's image",
        "support",
        {"image": "data"},
        (("image", "NOT_ALLOWED", "data", "base", "sandbox.images"),),
    ),
    Case(
        "the other's modules",
        "support",
        {"authorized_imports": ["math", "numpy"]},
        (_import("numpy", "nothing more than the defaults"),),
    ),
    Case(
        "the other's limits",
        "support",
        {"limits": {"wall_time_s": 90, "memory_bytes": 2**30, "cpu_time_s": 90}},
        (_above("wall_time_s", "90", "20"), _above("memory_bytes", "1,073,741,824", "536,870,912")),
    ),
    Case(
        "any tool",
        "support",
        {"tools": ["search"]},
        (
            ("tools[0]", "NOT_ALLOWED", "host", "no tools", "tools.placements"),
            ("tools[0].name", "NOT_ALLOWED", "search", "no tools", "tools.allowed"),
        ),
    ),
    Case(
        "any tool that runs in the sandbox",
        "support",
        {"sandbox_tools": ["search"]},
        (
            ("tools[0]", "NOT_ALLOWED", "sandbox", "no tools", "tools.placements"),
            ("tools[0].name", "NOT_ALLOWED", "search", "no tools", "tools.allowed"),
        ),
    ),
    Case("a file that the other could not put", "support", {"put_file": {"size_bytes": 1001, "so_far": 2}}),
    # -- those that get nothing
    Case(
        "a tenant of another backend",
        "far",
        {},
        (("backend", "NOT_ALLOWED", "local", "docker", "sandbox.backends"),),
    ),
    Case(
        "a tenant that is not listed",
        "stranger",
        {},
        (("tenant", "NOT_ALLOWED", "stranger", "a tenant that is listed", "default"),),
    ),
]
