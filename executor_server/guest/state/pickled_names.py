"""Checks the classes and functions that a state names: those that the program may import, and those of plain values.

A pickle calls the functions that it names. So of the standard library it may name only what the rules authorize, and
the few classes and functions that make plain values. Of other libraries it may name classes if the library is loaded
already, as a pandas table names its array. Nothing is imported that the program could not import, least of all a file
of the workspace.

This is a guard-rail, like the rules of imports themselves. The sandbox is the wall.
"""

from __future__ import annotations

import sys
import types

from ..checks.language import starts_processes
from ..checks.modules import is_standard, public_name
from .index import NotPickled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from ..checks.rules import Rules


def check_name(rules: Rules, module: str, name: str) -> None:
    """Checks a name before it is looked up. Raises NotPickled if the rules refuse it, or if it makes no value."""
    public = public_name(module)
    if rules.denies(public) or rules.denies(module):
        raise NotPickled(f"the policy denies {public}")
    if "dangerous_functions" in rules.refused and starts_processes(public, name):
        raise NotPickled(f"it needs {public}.{name}, which language.dangerous_functions refuses")
    if name in _DATA.get(module, ()):
        return
    top = module.partition(".")[0]
    if "." in name or (name[:2] == "__" and name[-2:] == "__") or top in _NEVER:
        raise NotPickled(f"it needs {module}.{name}, which no state may name")
    if module == "__main__" or _authorizes(rules, public) or any(_authorized_parents(rules, public)):
        return
    if is_standard(module) or module not in sys.modules:
        raise NotPickled(f"it needs {public}.{name}, and the import of {public} is not authorized here")


def check_value(rules: Rules, module: str, name: str, value: Any) -> None:
    """Checks the object behind a name that passed `check_name`. Raises NotPickled, too."""
    if isinstance(value, types.ModuleType):
        raise NotPickled(f"it reaches the module {module}.{name} through another one")
    if value is types.CodeType or value is types.FunctionType:
        raise NotPickled(f"it holds the type {value.__name__}, by which a state could make code")
    public = public_name(module)
    if name in _DATA.get(module, ()) or module == "__main__" or _authorizes(rules, public) or isinstance(value, type):
        return
    for parent in _authorized_parents(rules, public):
        if not is_standard(module) or getattr(sys.modules.get(parent), name, None) is value:
            return
    raise NotPickled(f"it needs {public}.{name}, and the import of {public} is not authorized here")


def is_ours_or_standard(module: str) -> bool:
    """True for a module of the guest, or of Python itself."""
    return module.partition(".")[0] in _NEVER or is_standard(module)


def _authorizes(rules: Rules, public: str) -> bool:
    return rules.authorizes(public) or (public == "os.path" and rules.authorizes("os"))


def _authorized_parents(rules: Rules, public: str) -> Iterator[str]:
    """Yields the authorized packages that contain this module: a program can reach its parts through them."""
    parts = public.split(".")
    for count in range(1, len(parts)):
        parent = ".".join(parts[:count])
        if rules.authorizes(parent):
            yield parent


_NEVER = frozenset(("cloudpickle", "executor_api", "executor_client", "executor_guest", "executor_server"))
_COLLECTIONS = (
    "AsyncGenerator AsyncIterable AsyncIterator Awaitable Buffer ByteString Callable Collection Container Coroutine"
    " Generator Hashable ItemsView Iterable Iterator KeysView Mapping MappingView MutableMapping MutableSequence"
    " MutableSet Reversible Sequence Set Sized ValuesView"
)
_ARRAYS = "_reconstruct scalar"
_CLOUDPICKLE = (
    "_get_dataclass_field_type_sentinel _make_cell _make_dict_items _make_dict_keys _make_dict_values"
    " _make_empty_cell _make_typevar"
)
# Names in the pickles of ordinary values, found by writing some of each kind. None of them runs, opens or looks up
# anything.
_DATA = {
    module: frozenset(names.split())
    for module, names in {
        "_collections": "OrderedDict _tuplegetter defaultdict deque",
        "_collections_abc": _COLLECTIONS,
        "_io": "BytesIO StringIO",
        "_operator": "getitem itemgetter or_",
        "_weakrefset": "WeakSet",
        "abc": "ABC ABCMeta abstractmethod",
        "array": "_array_reconstructor array",
        "cloudpickle.cloudpickle": _CLOUDPICKLE,
        "cloudpickle.cloudpickle_fast": _CLOUDPICKLE,
        "collections": "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque",
        "collections.abc": _COLLECTIONS,
        "contextlib": "_AsyncGeneratorContextManager _GeneratorContextManager nullcontext suppress",
        "copyreg": "__newobj__ __newobj_ex__ _reconstructor",
        "dataclasses": "Field FrozenInstanceError InitVar _DataclassParams _HAS_DEFAULT_FACTORY_CLASS _KW_ONLY_TYPE"
        " _MISSING_TYPE",
        "datetime": "date datetime time timedelta timezone tzinfo",
        "decimal": "Clamped Context Decimal DecimalException DivisionByZero FloatOperation Inexact InvalidOperation"
        " Overflow Rounded Subnormal Underflow",
        "enum": "Enum EnumMeta EnumType Flag IntEnum IntFlag StrEnum auto",
        "fractions": "Fraction",
        "functools": "partial partialmethod",
        "http": "HTTPStatus",
        "ipaddress": "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
        "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle islice"
        " permutations product repeat zip_longest",
        "json.decoder": "JSONDecodeError",
        "numbers": "Complex Integral Number Rational Real",
        "numpy": "dtype ndarray",
        "numpy._core.multiarray": _ARRAYS,
        "numpy._core.numeric": "_frombuffer",
        "numpy.core.multiarray": _ARRAYS,
        "numpy.core.numeric": "_frombuffer",
        "operator": "itemgetter",
        "random": "Random",
        "re": "RegexFlag _compile",
        "statistics": "NormalDist",
        "string": "Template",
        "time": "struct_time",
        "types": "GenericAlias MappingProxyType MethodType SimpleNamespace",
        "typing": "Annotated Any AnyStr Awaitable Callable ClassVar Collection Container DefaultDict Deque Dict Final"
        " FrozenSet Generic Hashable Iterable Iterator List Literal Mapping MutableMapping MutableSequence NamedTuple"
        " NoReturn Optional OrderedDict Protocol Sequence Set Sized Text Tuple Type TypeVar TypedDict Union"
        " _ProtocolMeta _TypedDictMeta _allow_reckless_class_checks _get_protocol_attrs _is_callable_members_only"
        " _no_init _no_init_or_replace_init",
        "urllib.parse": "DefragResult ParseResult ParseResultBytes SplitResult SplitResultBytes",
        "uuid": "SafeUUID UUID",
        "zoneinfo": "ZoneInfo",
    }.items()
}
