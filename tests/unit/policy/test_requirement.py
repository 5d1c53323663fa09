"""Requirements of packages: what they may say, their one canonical form, and the clause for everything else."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from executor_server.policy.requirement import (
    MAX_REQUIREMENT_CHARS,
    BadRequirement,
    Requirement,
    merged,
    read_granted,
    read_requirement,
)

WORLD = [
    ("pandas", "pandas"),
    ("Pandas", "pandas"),
    ("pan_das", "pan-das"),
    ("Pan.-_das", "pan-das"),
    ("  pandas  ", "pandas"),
    ("pandas >= 2 , < 3", "pandas<3,>=2"),
    ("pandas (>=2)", "pandas>=2"),
    ("pandas>=2,>=2", "pandas>=2"),
    ("pandas==1.0.0RC1", "pandas==1.0.0rc1"),
    ("pandas==1-1", "pandas==1.post1"),
    ("pandas==2.*", "pandas==2.*"),
    ("pandas!=2.1.*", "pandas!=2.1.*"),
    ("pandas~=2.1", "pandas~=2.1"),
    ("torch==2.0+CPU", "torch==2.0+cpu"),
    ("x[]", "x"),
    ("x[B_b,a,A]", "x[a,b-b]"),
    ("web.py", "web-py"),
    ("x; python_version<'3.12'", 'x; python_version < "3.12"'),
    ("x>=1 ; python_version >= '3.9'", 'x>=1; python_version >= "3.9"'),
    ("x; os.name == 'posix' and sys_platform != 'win32'", 'x; os_name == "posix" and sys_platform != "win32"'),
    ("x; python_full_version == '3.11.4'", 'x; python_full_version == "3.11.4"'),
    ("x; platform_machine == 'aarch64'", 'x; platform_machine == "aarch64"'),
    ("x; sys_platform == 'win32'", 'x; sys_platform == "win32"'),  # the resolver leaves it out, as pip does
    ("x; (python_version < '3.10' or (os_name == 'posix'))", 'x; python_version < "3.10" or os_name == "posix"'),
]

ADDRESS = "is a URL, but packages come from the daemon's index only"
PATH = "is a path, but packages come from the daemon's index only"
OPTION = "is an option; options of pip or uv can't be given"

REFUSED = [
    ("", "is empty"),
    ("   ", "is empty"),
    ("x" * 10_000, "is longer than 256 characters"),
    ("x" * 101, "has a name of more than 100 characters"),
    ("x @ file:///etc/passwd", ADDRESS),
    ("x@https://example.com/x.whl", ADDRESS),
    ("https://example.com/x.whl", ADDRESS),
    ("git+https://example.com/x", ADDRESS),
    ("git+ssh://git@example.com/x", ADDRESS),
    ("x[a] @ git+https://example.com/x; python_version>'3'", ADDRESS),
    ("file:///x", ADDRESS),
    ("./x", PATH),
    ("../x", PATH),
    (".", PATH),
    ("~x", PATH),
    ("/x", PATH),
    ("x/y", PATH),
    ("x\\y", PATH),
    ("x-1.0-py3-none-any.whl", PATH),
    ("x-1.0.tar.gz", PATH),
    ("requirements.txt", PATH),
    ("pylock.toml", PATH),
    ("-r x", OPTION),
    ("-rrequirements", OPTION),
    ("--requirement=x", OPTION),
    ("-e .", OPTION),
    ("-c x", OPTION),
    ("--index-url x", OPTION),
    ("--index-url=https://example.com", OPTION),
    ("--extra-index-url x", OPTION),
    ("--pre", OPTION),
    ("x --hash=sha256:00", OPTION),
    ("x==1 --no-deps", OPTION),
    ("\u0440andas", "has the character U+0440 CYRILLIC SMALL LETTER ER; names are ASCII"),
    ("p\uff41ndas", "has the character U+FF41 FULLWIDTH LATIN SMALL LETTER A"),
    ("pandas\u200b", "has the character U+200B ZERO WIDTH SPACE"),
    ("pan\u00addas", "has the character U+00AD SOFT HYPHEN"),
    ("pandas\u202e", "has the character U+202E RIGHT-TO-LEFT OVERRIDE"),
    ("pandas\ud800", "has the character U+D800"),
    ("x\n-r y", "has the character U+000A"),
    ("x\ty", "has the character U+0009"),
    ("x\0", "has the character U+0000"),
    ("x\x1b[2J", "has the character U+001B"),
    ("x\x7f", "has the character U+007F"),
    ("x===1", 'has "===", which compares texts; "==" compares versions'),
    ("x!=1.0+local", 'has the local version 1.0+local, which only "==" can name'),
    ("x>=1.0+local", "can't be read: "),
    ("x==", "can't be read: "),
    ("x~=1", "can't be read: "),
    ("x=1", "can't be read: "),
    ("x y", "can't be read: "),
    ("x, y", "can't be read: "),
    ("x # y", "can't be read: "),
    ("x==${HOME}", "can't be read: "),
    ("-x", OPTION),
    ("_x", "can't be read: "),
    ("x-", "can't be read: "),
    ("[x]", "can't be read: "),
    ("x[", "can't be read: "),
    ("x;", "can't be read: "),
    ("x; y", "can't be read: "),
    ("*", "can't be read: "),
    (f"x[{','.join(f'e{number}' for number in range(17))}]", "has more than 16 extras"),
    ("x; extra == 'a'", "has a marker about extra, which is unknown before the sandbox is made"),
    ("x; 'a' in extras", "has a marker about extras"),
    ("x; 'a' in dependency_groups", "has a marker about dependency_groups"),
    ("x; platform_release >= '5'", "has a marker about platform_release"),
    ("x; platform_version == '1'", "has a marker about platform_version"),
    ("x; 'a' == 'a'", "has a marker that compares what can't be compared"),
    ("x; os_name ~= 'a'", "has a marker that compares what can't be compared"),
    ("x; os_name != '${HOME}'", "has a marker with invalid characters"),
    (f"x; {'(' * 9}os_name == 'posix'{')' * 9}", "has too many parentheses"),
]


@pytest.mark.parametrize(("text", "canonical"), WORLD)
def test_a_requirement_has_one_form(text: str, canonical: str) -> None:
    assert read_requirement(text).text == canonical
    assert read_requirement(canonical) == read_requirement(text)


@pytest.mark.parametrize(("text", "clause"), REFUSED)
def test_all_else_is_refused_with_the_reason(text: str, clause: str) -> None:
    with pytest.raises(BadRequirement) as caught:
        read_requirement(text)
    assert str(caught.value).startswith(clause)
    assert str(caught.value).isprintable()


def test_a_canonical_form_that_is_too_long_is_refused_too() -> None:
    """It could not be read again; and 1-1 becomes 1.post1."""
    versions = ",".join(f"!=1-{number}" for number in range(40))
    text = f"x{versions}"[:MAX_REQUIREMENT_CHARS].rpartition(",")[0]
    with pytest.raises(BadRequirement, match="is longer than 256 characters in canonical form"):
        read_requirement(text)


def test_a_granted_requirement_has_room_for_the_bounds_of_a_policy() -> None:
    asked = read_requirement("x" + ",".join(f"!={number}" for number in range(1000, 1030)))
    granted = asked.within(
        (), read_requirement("x" + ",".join(f"!={number}" for number in range(2000, 2030))).specifiers
    )
    assert len(granted.text) > MAX_REQUIREMENT_CHARS and read_granted(granted.text) == granted


def test_markers_are_read_in_milliseconds_wherever_they_hold() -> None:
    """Trying every Python in which a marker might hold took 20 ms of the daemon's only loop for each."""
    numbers = iter(range(100, 1000))
    began = time.process_time()
    for _ in range(100):
        patches = " or ".join(f"python_full_version == '3.20.{next(numbers)}'" for _ in range(3))
        last = "(python_full_version >= '3.20.99' and platform_machine != 'x86_64')"
        read_requirement(f"x; {patches} or {last}")
    assert time.process_time() - began < 0.5


# -- several


def texts(*asked: str) -> list[str]:
    return [each.text for each in merged(map(read_requirement, asked))]


def test_requirements_of_one_package_become_one() -> None:
    assert texts("pandas<3", "numpy", "Pandas[excel]>=2", "PANDAS[html]") == ["numpy", "pandas[excel,html]<3,>=2"]


def test_requirements_for_different_pythons_stay_apart() -> None:
    """As resolvers write them for several Pythons."""
    asked = ('x<2; python_version < "3.12"', 'x>=2; python_version >= "3.12"')
    assert texts(*asked) == list(asked)


def test_bounds_that_exclude_each_other_stay_for_the_resolver_to_explain() -> None:
    assert texts("x==1", "x==2") == ["x==1,==2"]


def test_too_many_bounds_of_one_package_are_refused() -> None:
    with pytest.raises(BadRequirement, match="ask for x with too many bounds"):
        texts(*(f"x!={number}" for number in range(256)))


# -- anything


def canonical(text: str) -> Requirement | None:
    try:
        return read_requirement(text)
    except BadRequirement as refusal:
        assert str(refusal) and str(refusal).isprintable()
        return None


def reads_to_itself(text: str) -> bool:
    found = canonical(text)
    return found is None or (read_requirement(found.text) == found and read_requirement(found.text).text == found.text)


PARTS = (
    "x Pandas a_b [ ] [a] [A_b,c] , ; ( ) @ == === >= < ~= != 1 2.0 1.* 1.0rc1 1!2 1-1 +local python_version os_name "
    "python_full_version platform_machine extra 'posix' '3.12' \"3\" '3.11.4' in not and or -r --x ./ :// \\ .whl # $ *"
)
parts = st.sampled_from(PARTS.split())


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert reads_to_itself(text)


@given(st.lists(st.one_of(parts, st.just(" ")), max_size=16).map("".join))
def test_any_text_of_the_parts_of_requirements_is_read_or_refused(text: str) -> None:
    assert reads_to_itself(text)


names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,8}[A-Za-z0-9])?", fullmatch=True)
versions = st.from_regex(r"([0-9]!)?[0-9]{1,3}(\.[0-9]{1,3}){0,3}((a|b|rc|c|-|\.post|\.dev)[0-9])?", fullmatch=True)
specifiers = st.builds("{}{}".format, st.sampled_from(["==", "!=", ">=", "<=", "<", ">", " >= "]), versions)
markers = st.builds(
    "{} {} '{}'".format,
    st.sampled_from(["python_version", "python_full_version"]),
    st.sampled_from([">=", "<", "==", "!=", "in", "not in"]),
    st.sampled_from(["3.9", "3.11.4", "3.12", "3.30"]),
)
requirements = st.builds(
    lambda name, extras, bounds, marker: f"{name}[{','.join(extras)}]{','.join(bounds)}{marker and '; ' + marker}",
    names,
    st.lists(names, max_size=2),
    st.lists(specifiers, max_size=3),
    st.one_of(st.just(""), markers, st.builds("{} or {}".format, markers, markers)),
)


@given(requirements)
def test_what_is_read_is_within_itself_and_reads_to_itself(text: str) -> None:
    found = canonical(text)
    assume(found is not None)
    assert found is not None
    assert reads_to_itself(text) and found.is_within(found)
    assert merged([found, found]) == (found,)
