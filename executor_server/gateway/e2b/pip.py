"""`!pip install` in sandboxes without a network: it can't install, so it reports which packages are there.

E2B's clients send such lines for packages that the image has. As in a notebook, a command that fails prints the reason,
and the code goes on. With a network, the line runs as it is.

Each word of a line is parsed, and makes the code longer, so the answers are limited. Further lines run as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.requirements import InvalidRequirement, Requirement

from executor_client.aio_session import AsyncSession
from executor_client.errors import EvaluationError

CODE_CHARS_MAX = 256 << 10
"""Characters of code that is searched for lines."""
LINE_CHARS_MAX = 1024
"""Characters of a line that is answered."""
WORDS_MAX = 64
"""Packages that are answered for."""
_VERSION_CHARS_MAX = 64

# Strings and comments are matched, too, so that the search skips their lines. An open string matches up to the end;
# otherwise a text of many quotes would be searched again from each quote.
_LINE = re.compile(
    r"""
    (?P<quote>\"{3}|'{3})(?:\\(?:.|\Z)|[^\\])*?(?:(?P=quote)|\Z)
    |"(?:\\.|[^"\\\n])*"?
    |'(?:\\.|[^'\\\n])*'?
    |\#[^\n]*
    |^(?P<indent>[ \t]*)[!%][ \t]*(?:python[\d.]*[ \t]+-m[ \t]+)?(?:uv[ \t]+)?pip3?[ \t]+install(?P<rest>[ \t][^\n]*)?$
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# The version of each distribution of these names; empty for a module of this name, None if there is neither.
_VERSIONS = """(lambda metadata, find, names: {
    name: next((each.version for each in metadata.distributions(name=name)), None if find(name) is None else "")
    for name in names
})(__import__("importlib.metadata").metadata, __import__("importlib.util").util.find_spec, %r)"""


async def resolved(session: AsyncSession, code: str) -> str:
    """Returns the code with a print of the answer in place of each line that installs packages."""
    if session.info.network or "install" not in code or len(code) > CODE_CHARS_MAX:
        return code
    lines = _lines(code)
    if not lines:
        return code
    names = sorted({found.group() for _, words in lines for word in words if (found := _NAME.match(word))})
    try:
        versions = await session.evaluate(_VERSIONS % names)
    except EvaluationError:  # the policy refuses the modules; the sandbox then says what to do instead of the line
        return code
    if not isinstance(versions, Mapping):  # it comes from agent code
        return code

    parts, end = [], 0
    for line, words in lines:
        states = "\n".join(_state(word, versions) for word in words)
        parts += [code[end : line.start()], f"{line['indent']}print({states!r})"]
        end = line.end()
    return "".join([*parts, code[end:]])


def _lines(code: str) -> list[tuple[re.Match[str], list[str]]]:
    """Returns the lines to answer, with their packages."""
    lines, count = [], 0
    for line in _LINE.finditer(code):
        if line["indent"] is None or len(line[0]) > LINE_CHARS_MAX:
            continue
        words = [word.strip("'\"") for word in (line["rest"] or "").partition("#")[0].split() if word[0] != "-"]
        count += len(words)
        if count > WORDS_MAX:
            break
        if words:
            lines.append((line, words))
    return lines


def _state(word: str, versions: Mapping[str, object]) -> str:
    found = _NAME.match(word)
    version = versions.get(found.group()) if found else None
    version = version[:_VERSION_CHARS_MAX] if isinstance(version, str) else None  # it comes from agent code
    if version is not None and _fits(word, version):
        return f"Requirement already satisfied: {word}" + (f" ({version})" if version else "")
    have = f", only version {version} is" if version else ""
    return (
        f"ERROR: {word} is not installed{have}, and can't be: the policy gives this sandbox no network "
        "(network.default). Use a module that is there, or a template whose image has the package"
    )


def _fits(word: str, version: str) -> bool:
    try:
        return not version or Requirement(word).specifier.contains(version, prereleases=True)
    except InvalidRequirement:
        return False
