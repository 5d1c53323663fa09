"""The rules that agent code is held to: what it may import, and what of the language it may not use.

They come from the policy, through the daemon, and are the same for a source that is checked, for the interpreter, and
for text that a program runs. They are a guard-rail that tells a model what it can use; the wall is the sandbox.
"""

from __future__ import annotations

from .frames import Fields, FrameError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Sequence

LANGUAGE_RULES = frozenset(
    (
        "dunder_access",
        "dynamic_code",
        "namespaces",
        "foreign_modules",
        "module_attributes",
        "dangerous_functions",
        "open",
        "file_writing",
        "unlisted_builtins",
    )
)
_MAX_PATTERNS = 2048
_MAX_PATTERN_CHARS = 256


class Rules:
    """Patterns of modules that may be imported, patterns of those that never may, and the language rules in force."""

    __slots__ = ("_authorized_tree", "_denied_tree", "authorized", "denied", "refused")

    def __init__(self, authorized: Sequence[str] = (), denied: Sequence[str] = (), refused: Sequence[str] = ()) -> None:
        self.authorized = tuple(authorized)
        self.denied = tuple(pattern[:-2] if pattern.endswith(".*") else pattern for pattern in denied)
        self.refused = frozenset(refused)
        if "*" in self.authorized and not self.denied:
            self.refused -= {"foreign_modules"}  # no module is foreign, and what looks for one would cost something
        self._authorized_tree = _tree(self.authorized)
        self._denied_tree = _tree(self.denied)

    def authorizes(self, module: str) -> bool:
        """Whether the module may be imported.

        A pattern names a module ("numpy", "os.path"), everything below one ("numpy.*", which includes "numpy"), or
        everything ("*"). Authorized, "os.path" authorizes "os" too, and "numpy" does not authorize "numpy.random":
        so has smolagents it. Denied, "os" goes with all below it, and "os.path" says nothing of "os"; what is denied
        is so whatever authorizes it. Names are compared part by part, so "re" says nothing of "reprlib".
        """
        return _leads_on(self._authorized_tree, module.split(".")) and not self.denies(module)

    def denies(self, module: str) -> bool:
        """Whether no authorization helps."""
        return _ends_in(self._denied_tree, module.split("."))

    def denied_below(self, module: str) -> str:
        """A module below this one that is denied; empty when there is none."""
        prefix = f"{module}."
        return next((pattern for pattern in self.denied if pattern.startswith(prefix)), "")

    def fields(self) -> dict[str, Any]:
        """As they travel."""
        return {"authorized": list(self.authorized), "denied": list(self.denied), "refused": sorted(self.refused)}

    @classmethod
    def read(cls, fields: Fields) -> Rules:
        """Raises FrameError, for rules that nobody here could enforce too."""
        refused = fields.texts("refused", len(LANGUAGE_RULES), 64)
        if not LANGUAGE_RULES.issuperset(refused):
            raise FrameError("a language rule that does not exist")
        return cls(
            fields.texts("authorized", _MAX_PATTERNS, _MAX_PATTERN_CHARS),
            fields.texts("denied", _MAX_PATTERNS, _MAX_PATTERN_CHARS),
            refused,
        )


def _tree(patterns: Iterable[str]) -> dict[str, Any]:
    """Patterns by their parts; where one ends, the key is empty."""
    tree: dict[str, Any] = {}
    for pattern in patterns:
        node = tree
        for part in pattern.split("."):
            node = node.setdefault(part, {})
        node[""] = {}
    return tree


def _leads_on(tree: dict[str, Any], parts: list[str]) -> bool:
    """Whether some pattern begins with these parts, or ends in "*" before that."""
    node = tree
    for part in parts:
        if "*" in node:
            return True
        if not part or part not in node:
            return False
        node = node[part]
    return True


def _ends_in(tree: dict[str, Any], parts: list[str]) -> bool:
    """Whether some pattern is all of these parts, or the first of them."""
    node = tree
    if "*" in node:
        return True
    for part in parts:
        if not part or part not in node:
            return False
        node = node[part]
        if "" in node:
            return True
    return False
