"""Explains a line that installs packages, such as IPython's `!pip install`, which is no Python.

Models know such lines from notebooks. The parser's "invalid syntax" would have them try the same in another form.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

# Compiled at their first use, as most sources have no such line.
_INSTALL = (
    r"\s*(?P<command>[!%]{0,2}\s*(?:(?:python[\d.]*|\{?sys\.executable\}?)\s+-m\s+)?(?:uv\s+)?(?:pip[\d.]*|conda|mamba)"
    r"\s+install)(?:\s+(?P<rest>.*))?$"
)
# A distribution with extras and bounds. What else stands on such a line is no name to repeat.
_REQUIREMENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?:\[[A-Za-z0-9._,-]{1,64}\])?(?:[<>=!~]=?[A-Za-z0-9.*+]+)?"
LINE_CHARS_MAX = 1_000
_NAMES_MAX = 8
# Options of pip whose value is the next word.
_WITH_VALUE = frozenset({"-r", "-c", "-i", "-f", "-t", "-e", "-n", "--index-url", "--extra-index-url", "--target"})


def explanation(line: str) -> Optional[str]:
    """Returns the message for a source line that is no Python because it installs packages; None for any other."""
    found = re.match(_INSTALL, line[:LINE_CHARS_MAX])
    if found is None:
        return None
    command = " ".join(found.group("command").split())
    names = ", ".join(f'"{name}"' for name in _requirements(found.group("rest") or "")) or "..."
    return (
        f"{command!r} is no Python. Import the module: it may be installed. "
        f"If it is not, the session has to be made with packages=[{names}]"
    )


def _requirements(rest: str) -> list[str]:
    names = []
    words = iter(rest.partition("#")[0].split())
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif re.fullmatch(_REQUIREMENT, word.strip("'\"")):
            names.append(word.strip("'\""))
    return names[:_NAMES_MAX]
