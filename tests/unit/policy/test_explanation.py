"""A refusal is explained by the line that a person would have to change, however the file is written."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.config.problems import undotted
from executor_server.policy.decide import Policy
from executor_server.policy.explain.explanation import Explanation, PolicyText, explain, places
from executor_server.policy.explain.lines import Lines
from executor_server.policy.explain.question import Question
from executor_server.policy.file import built_in_policy, parse_policy

TEXT = '''\
# a comment [profiles.none]
version = "1"   # [profiles.none]
"default" = 'base'

[profiles.base]
imports . allowed = [   # with ] a comment
  "numpy.*",
  "a]", # "
  """b
  [profiles.none]
""",
]
limits = { max = { memory_bytes = 4_000_000_000, processes = 64 }, default = { processes = 64 } }
'audit'."code" = "full"
[profiles."with.dot".limits . max]
wall_time_s = 90.0
[profiles]
late.files.max_puts = 5
[tenants.x] # the end'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("version", 2),
        ("default", 3),
        ("profiles.base", 5),
        ("profiles.base.imports.allowed", 6),
        ("profiles.base.limits", 13),
        ("profiles.base.limits.max.memory_bytes", 13),
        ("profiles.base.audit.code", 14),
        ('profiles."with.dot".limits.max', 15),
        ('profiles."with.dot".limits.max.wall_time_s', 16),
        ("profiles.late.files.max_puts", 18),
        ("tenants.x", 19),
        ("profiles.none", None),
        ("profiles.base.imports.denied", None),
        ("profiles.base.limits.max.wall_time_s", None),
        ("files.max_puts", None),
    ],
)
def test_a_key_is_found_where_it_is_written(key: str, line: int | None) -> None:
    found = Lines(TEXT).of_key(undotted(key))
    assert (found.number if found is not None else None) == line


def test_the_text_of_a_line_is_as_it_is_written() -> None:
    found = Lines(TEXT.replace("\n", "\r\n")).of_key(("profiles", "base", "imports", "allowed"))
    assert found is not None
    assert found.text == "imports . allowed = [   # with ] a comment"


@pytest.mark.parametrize(
    ("key", "kind", "line", "write"),
    [
        ("profiles.base.imports.denied", "below", 5, "imports.denied"),
        ("profiles.base.limits.max.wall_time_s", "within", 13, "max.wall_time_s"),
        ('profiles."with.dot".limits.max.processes', "below", 15, "processes"),
        ('profiles."with.dot".quotas.calls', "below", 17, '"with.dot".quotas.calls'),
        ("profiles.late.quotas.calls", "below", 17, "late.quotas.calls"),
        ("tenants.x.profile", "below", 19, "profile"),
    ],
)
def test_a_key_that_is_not_written_has_a_place_to_go(key: str, kind: str, line: int, write: str) -> None:
    found = Lines(TEXT).free_place_for(undotted(key))
    assert found is not None
    assert (found.kind, found.line.number, found.write) == (kind, line, write)


@pytest.mark.parametrize(
    ("text", "kind", "write"),
    [
        ("[profiles.a]\nlimits.max.processes = 9\n[profiles.a.limits.default]\n", "below", "limits.max.wall_time_s"),
        ("[profiles.a]\n[profiles.a.limits.default]\n[profiles.b]\n", "below", "limits.max.wall_time_s"),
        ("[profiles.a.limits]\nmax.processes = 9\n[profiles.a]\n", "below", "max.wall_time_s"),
        ("[profiles]\na.limits.max.processes = 9\n", "below", "a.limits.max.wall_time_s"),
        ("[profiles.a.limits.default]\nprocesses = 9\n", "new", "[profiles.a.limits.max]"),
        ("profiles.a.files.max_puts = 9\n[profiles.b]\n", "new", "[profiles.a.limits.max]"),
    ],
)
def test_a_key_can_be_written_where_it_is_said_to_go(text: str, kind: str, write: str) -> None:
    path = ("profiles", "a", "limits", "max", "wall_time_s")
    room = Lines(text).free_place_for(path)
    assert room is not None
    assert (room.kind, room.write) == (kind, write)
    lines = text.splitlines()
    if kind == "below":
        lines.insert(room.line.number, f"{write} = 5")
    else:
        lines += [write, "wall_time_s = 5"]
    assert Lines("\n".join(lines)).of_key(path) is not None
    tomllib.loads("\n".join(lines))


POLICY = """\
[profiles.base]
imports.allowed = ["numpy.*", "pandas"]
imports.denied = [
  "os",
]
limits.max.wall_time_s = 100
sandbox.backends = ["local", "docker"]
tools.allowed = ["search"]

[profiles.base.limits.execution_max]
wall_time_s = 50

[profiles.mine]
extends = "base"
language.preset = "strict"
language.dynamic_code = false
sandbox.images = ["base"]
quotas.sessions = 2
[profiles.mine.files]
max_put_bytes = 1000
max_gets = 0x10

[tenants.me]
profile = "mine"
"""


def explained(asked: dict[str, Any], tenant: str = "me", config_text: str = "", text: str = POLICY) -> Explanation:
    file = parse_policy(text.encode(), Path("p.toml")) if text else built_in_policy()
    policy = Policy(file, images=["base", "data"], backend="local", orphan_time_s=600.0)
    return explain(PolicyText(policy, text, config_text), tenant, Question.model_validate(asked))


REFUSALS: list[tuple[dict[str, Any], str, int, str]] = [
    ({"limits": {"wall_time_s": 101}}, "limits.wall_time_s", 6, "limits.max.wall_time_s of profile base, which mine"),
    ({"authorized_imports": ["torch"]}, "authorized_imports", 2, "imports.allowed of profile base, which mine extends"),
    ({"authorized_imports": ["os.path"]}, "authorized_imports", 3, "imports.denied of profile base, which mine"),
    ({"image": "data"}, "image", 17, "sandbox.images of profile mine"),
    ({"network": ["a.example"]}, "network", 13, "network.allowed is not written, so it has its default"),
    ({"connections": ["a.example:443"]}, "connections", 13, "network.default is not written, so it has its default"),
    ({"packages": ["a"]}, "packages", 13, "packages.allowed is not written, so it has its default"),
    ({"limits": {"processes": 5000}}, "limits.processes", 13, "limits.max.processes is not written, so it has its"),
    ({"execution": {"wall_time_s": 55}}, "limits.wall_time_s", 11, "limits.execution_max.wall_time_s of profile base"),
    ({"execution": {"cpu_time_s": 500}}, "limits.cpu_time_s", 13, "limits.default.cpu_time_s is not written, so it"),
    ({"tools": ["search", "other"]}, "tools[1].name", 8, "tools.allowed of profile base, which mine extends"),
    ({"put_file": {"size_bytes": 1001}}, "size_bytes", 20, "files.max_put_bytes of profile mine"),
    ({"get_file": {"so_far": 16}}, "path", 21, "files.max_gets of profile mine"),
    ({"imports": ["os.path"]}, "imports", 3, "imports.denied of profile base, which mine extends"),
    ({"imports": ["torch"]}, "imports", 13, "imports.default is not written, so it has its default"),
    ({"language": ["dynamic_code"]}, "language", 16, "language.dynamic_code of profile mine"),
    ({"language": ["open"]}, "language", 15, "language.preset of profile mine"),
    ({"usage": {"sessions": 3}}, "usage.sessions", 18, "quotas.sessions of profile mine"),
]


@pytest.mark.parametrize(("asked", "field", "line", "advice"), REFUSALS)
def test_a_refusal_names_the_line_behind_it(asked: dict[str, Any], field: str, line: int, advice: str) -> None:
    explanation = explained(asked)
    (refusal,) = explanation.refusals
    assert explanation.granted is None
    assert refusal.violation is not None
    assert refusal.violation.field == field
    assert refusal.place.line is not None
    assert refusal.place.line.number == line
    assert refusal.place.line.text == POLICY.splitlines()[line - 1]
    assert refusal.place.advice.startswith(advice)


def test_a_package_that_only_an_own_index_could_give_names_the_configuration() -> None:
    text = POLICY + "\n[profiles.mine.packages]\nallowed = ['*', 'x>1']\n"
    (refusal,) = explained({"packages": ["y"]}, text=text).refusals
    assert refusal.message.startswith("packages: asked for y, allowed is x>1; others where the daemon has an index of")
    assert refusal.place.is_in_config
    advice = "environments.index_url of the daemon's configuration, which is not set; no policy can change it"
    assert refusal.place.advice == advice
    (bounded,) = explained({"packages": ["x<1"]}, text=text).refusals
    assert bounded.place.line is not None and bounded.place.line.text == "allowed = ['*', 'x>1']"


def test_a_default_that_is_not_written_is_told_where_it_would_go() -> None:
    (refusal,) = explained({"limits": {"processes": 5000}}).refusals
    assert refusal.place.advice.endswith("write `limits.max.processes = …` below this line")


def test_a_host_whose_secret_the_backend_can_t_set_is_explained_by_both_ways_out() -> None:
    text = """\
        default = "a"
        [profiles.a.network]
        allowed = ["api.example.com"]
        [[profiles.a.network.secrets]]
        host = "api.example.com"
        header = "X-Key"
        value = "${key}"
        """
    policy = Policy(parse_policy(text.encode(), Path("p.toml")), images=["base"], backend="e2b", orphan_time_s=600.0)
    question = Question.model_validate({"network": ["api.example.com:443"]})
    (refusal,) = explain(PolicyText(policy, text), "me", question).refusals
    assert refusal.place.line is not None and refusal.place.line.number == 4
    assert refusal.place.advice == (
        "network.secrets of profile a; or another backend first (sandbox.backends), which sets headers"
    )


def test_every_refusal_is_explained_at_once() -> None:
    asked = {"image": "data", "limits": {"wall_time_s": 101}, "authorized_imports": ["os", "torch"]}
    lines = [refusal.place.line.number for refusal in explained(asked).refusals if refusal.place.line is not None]
    assert lines == [17, 6, 3, 2]


def test_what_is_granted_has_no_refusal() -> None:
    explanation = explained(
        {
            "authorized_imports": ["numpy.linalg"],
            "limits": {"wall_time_s": 100},
            "execution": {"wall_time_s": 50},
            "tools": ["search"],
            "put_file": {"size_bytes": 1000},
            "get_file": {"so_far": 15},
            "imports": ["numpy.linalg", "math"],
            "usage": {"sessions": 2, "calls": 10**6},
        }
    )
    assert (explanation.lineage, explanation.refusals) == (("mine", "base"), ())
    assert explanation.granted is not None
    assert explanation.granted.limits.wall_time_s == 100


def test_a_module_that_the_session_could_have_asked_for_is_told_so() -> None:
    (refusal,) = explained({"imports": ["numpy"]}).refusals
    assert refusal.place.advice.endswith("or the session asks for it, which it may (authorized_imports of the request)")


def test_what_the_session_asked_for_itself_is_no_line_of_the_policy() -> None:
    (refusal,) = explained({"limits": {"wall_time_s": 20}, "execution": {"wall_time_s": 30}}).refusals
    assert refusal.place.line is None
    assert refusal.place.advice.startswith("nothing in the policy: the session itself requests no more")


def test_a_tenant_that_is_not_listed_is_told_of_the_missing_default() -> None:
    explanation = explained({}, tenant="nobody")
    (refusal,) = explanation.refusals
    assert explanation.lineage == ()
    assert refusal.place.advice.startswith("default, which is not written")
    assert refusal.place.line is not None
    assert refusal.place.line.number == 1


@pytest.mark.parametrize(
    ("config_text", "line", "advice"),
    [
        ('[server]\nbackend = "local"', 2, "server.backend of the daemon's configuration;"),
        ("", None, "server.backend of the daemon's configuration, which is not set;"),
    ],
)
def test_what_the_daemon_cannot_do_is_told_of_its_configuration(
    config_text: str, line: int | None, advice: str
) -> None:
    (refusal,) = explained({"backend": "docker"}, config_text=config_text).refusals
    assert refusal.place.is_in_config
    assert (refusal.place.line.number if refusal.place.line is not None else None) == line
    assert refusal.place.advice.startswith(advice)


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        ({"image": "nothing"}, "the configuration has no such image"),
        ({"limits": {"wall_time_s": -1}}, "the request is invalid"),
        ({"limits": {"operations": 10**400}}, "the request is invalid"),
        ({"execution": {"memory_bytes": 10**9}}, "the request is invalid"),
        ({"authorized_imports": ["a b"]}, "the request is invalid"),
    ],
)
def test_what_no_policy_could_grant_has_no_line(asked: dict[str, Any], advice: str) -> None:
    (refusal,) = explained(asked).refusals
    assert (refusal.violation, refusal.place.line) == (None, None)
    assert refusal.place.advice.startswith(advice)


def test_modules_of_the_workspace_are_refused_by_their_own_key() -> None:
    asked = {"imports": ["helper"], "workspace": ["helper"]}
    assert explained(asked, text="default = 'a'\n[profiles.a]\n").refusals == ()
    (refusal,) = explained(asked, text="default = 'a'\n[profiles.a]\nimports.workspace = false\n").refusals
    assert refusal.place.line is not None
    assert (refusal.place.line.number, refusal.violation and refusal.violation.rule) == (
        3,
        "profiles.a.imports.workspace",
    )


def test_the_built_in_policy_has_no_lines() -> None:
    explanation = explained({"limits": {"wall_time_s": 10**6}}, tenant="anybody", text="")
    assert explanation.lineage == ("default",)
    assert explanation.refusals[0].place.advice == (
        "the built-in policy says so; a policy file could say profiles.default.limits.max.wall_time_s"
    )


def test_a_policy_of_a_megabyte_is_explained() -> None:
    patterns = "".join(f'    "module{number}", # {number}\n' for number in range(1000))
    padding = "".join(f"[profiles.p{number}]\nlimits.max.wall_time_s = 100\n" for number in range(1000))
    text = f"default = 'a'\n{padding}[profiles.a]\nimports.allowed = [\n{patterns}]\nlimits.max.wall_time_s = 99\n"
    (refusal,) = explained({"limits": {"wall_time_s": 100}}, text=text).refusals
    assert refusal.place.line is not None
    assert refusal.place.line.number == 2 + 2000 + 1 + 1002


def test_keys_of_violations_have_places_and_other_texts_have_none() -> None:
    text = 'version = "1"\ndefault = "a"\n[profiles.base.tools]\nask = ["x"]\n[profiles.a]\nextends = "base"\n'
    policy = Policy(parse_policy(text.encode(), Path("p")), images=["base"], backend="local", orphan_time_s=600.0)
    rules = [
        "profiles.a.tools.ask",
        "profiles.a.network.ask",
        "profiles.gone.tools.ask",
        "NO_NODE",
        "profiles.a",
        '"\\q"',
    ]
    found = places(PolicyText(policy, text), rules)
    lines = [(rule, place.line.number) for rule, place in found.items() if place.line is not None]
    assert lines == [("profiles.a.tools.ask", 4), ("profiles.a.network.ask", 5)]
