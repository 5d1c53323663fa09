"""The rules for agent code: modules that it may import, and parts of the language that it may not use.

They come from the policy, through the daemon. The checker, the interpreter, and `exec` in a program use the same ones.
They are a guard-rail, and their messages tell a model what it can use. The sandbox is the wall.
"""

from __future__ import annotations

from ..wire.frames import FrameError
from ..wire.lean import dumps
from ..wire.session_rules import LANGUAGE_RULES_MAX, CodeRules
from .own_modules import NoModules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, NoReturn, Optional, Sequence

    from .control import Refusal
    from .meter import Meter

LANGUAGE_RULES = (
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
"""The features of Python that a policy can forbid, besides imports; docs/policy.md explains each."""
assert len(LANGUAGE_RULES) <= LANGUAGE_RULES_MAX, "a session under all rules could not begin"


class Rules:
    """Patterns of modules that may be imported, patterns of those that never may, and the language rules in force.

    `network` names the hosts that may be reached, for messages. With `workspace` the program's own modules
    (own_modules.py) need no authorization.
    """

    __slots__ = ("_authorized_tree", "_denied_tree", "authorized", "denied", "network", "refused", "workspace")

    def __init__(
        self,
        authorized: Sequence[str] = (),
        denied: Sequence[str] = (),
        refused: Sequence[str] = (),
        network: Sequence[str] = (),
        *,
        workspace: bool = False,
    ) -> None:
        self.authorized = tuple(authorized)
        self.denied = tuple(pattern[:-2] if pattern.endswith(".*") else pattern for pattern in denied)
        self.refused = frozenset(refused)
        self.network = tuple(network)
        self.workspace = workspace
        if "*" in self.authorized and not self.denied:
            self.refused -= {"foreign_modules"}  # no module is foreign, so a search would cost time for nothing
        self._authorized_tree = _tree(self.authorized)
        self._denied_tree = _tree(self.denied)

    def authorizes(self, module: str) -> bool:
        """True when the module may be imported.

        A pattern names a module ("numpy", "os.path"), everything below one ("numpy.*", which includes "numpy"), or
        everything ("*"). As in smolagents, "os.path" authorizes "os" too, and "numpy" does not authorize
        "numpy.random". A denied "os" denies all below it, and a denied "os.path" leaves "os". Denial wins over
        authorization. Names are compared part by part, so "re" does not match "reprlib".
        """
        return _leads_on(self._authorized_tree, module.split(".")) and not self.denies(module)

    def authorizes_own(self, module: str) -> bool:
        """True when the module may be imported if it is the program's own; its package decides."""
        return (self.workspace or self.authorizes(module.partition(".")[0])) and not self.denies(module)

    @property
    def permit_all(self) -> bool:
        """True when the rules can refuse nothing."""
        return "*" in self.authorized and not self.denied and not self.refused

    def denies(self, module: str) -> bool:
        """True when the module is denied, even if it is authorized, too."""
        return _ends_in(self._denied_tree, module.split("."))

    def denied_below(self, module: str) -> str:
        """Returns a denied module below this one; empty when there is none."""
        prefix = f"{module}."
        return next((pattern for pattern in self.denied if pattern.startswith(prefix)), "")

    def packed(self) -> bytes:
        """Returns the rules as they are sent: CodeRules as JSON."""
        rules = CodeRules(
            authorized=list(self.authorized),
            denied=list(self.denied),
            refused=sorted(self.refused),
            network=list(self.network),
            workspace=self.workspace,
        )
        return dumps(rules.head())

    @classmethod
    def of(cls, rules: CodeRules) -> Rules:
        """Reads rules as they were sent. Raises FrameError for a rule that this version can't enforce."""
        if not set(rules.refused).issubset(LANGUAGE_RULES):
            raise FrameError("a language rule that does not exist")
        return cls(rules.authorized, rules.denied, rules.refused, rules.network or (), workspace=rules.workspace)


class RuleEnforcer:
    """Ends executions that break a rule, and keeps the first refusal of each execution.

    A refusal ends the execution even when it is swallowed: the guard raises it again in the program's own handlers,
    the next tick raises it again after a library's handler, and one in a thread decides how the whole execution ends.
    """

    def __init__(self, meter: Meter, own: Optional[NoModules] = None) -> None:
        """`own` knows the program's own modules."""
        self._meter = meter
        self._watches = False
        self.rules = Rules()  # those in force
        self.own = own or NoModules()
        self.refusal: Optional[Refusal] = None  # the first of the execution

    def begin(self) -> None:
        """Begins an execution."""
        self.refusal = None
        self._watches = True

    def end(self) -> None:
        """Ends the execution. A thread that outlives it can't end a later one by a refusal."""
        self._watches = False

    def refuse(self, refusal: Refusal) -> NoReturn:
        """Raises the refusal, now and at each further tick of the execution."""
        if self._watches and self.refusal is None:
            self.refusal = refusal
            self._meter.stop(lambda: refusal)
        raise refusal


def _tree(patterns: Iterable[str]) -> dict[str, Any]:
    """Returns patterns as a tree of their parts; the end of one is an empty key."""
    tree: dict[str, Any] = {}
    for pattern in patterns:
        node = tree
        for part in pattern.split("."):
            node = node.setdefault(part, {})
        node[""] = {}
    return tree


def _leads_on(tree: dict[str, Any], parts: list[str]) -> bool:
    """True when some pattern begins with these parts, or ends in "*" before that."""
    node = tree
    for part in parts:
        if "*" in node:
            return True
        if not part or part not in node:
            return False
        node = node[part]
    return True


def _ends_in(tree: dict[str, Any], parts: list[str]) -> bool:
    """True when some pattern is all of these parts, or the first of them."""
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
