"""Encodes and decodes lists, tuples, dicts, sets and the containers of `collections`.

A long list of one type of number or of text is sent as one buffer: that is ten times faster than node by node, and
its limit is in bytes instead of nodes.
"""

from __future__ import annotations

import sys

from executor_api.values.kinds import ANY_NUMBER, PAIRS, Kind, NoneType
from executor_api.values.limits import MAX_EQUAL_HASHES, MAX_INLINE_BYTES, DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

# Shorter lists are smaller and no slower as nodes.
_LONG = 32

_SET_TAGS = frozenset(["set", "frozenset"])
KEYED_TAGS = _SET_TAGS | {"dict", "ordereddict", "defaultdict", "counter"}
# Values of these types are hashable after decoding, and different values stay different.
PLAIN_KEYS = frozenset([str, int, float, bool, NoneType, bytes, complex])

# ---------------------------------------------------------------------------------------------------------------------
# Lists and tuples


def _lower_list(value: list[Any], writer: Writer) -> Lowered:
    items = value[:]  # another thread may go on changing the list itself
    if len(items) >= _LONG:
        packed = _lower_long_list(items, writer)
        if packed is not None:
            return packed
    return ["list"], items, True


def _lower_long_list(items: list[Any], writer: Writer) -> Lowered | None:
    first = type(items[0])
    if first not in (str, *_CODES) or list(map(type, items)).count(first) != len(items):
        return None
    if first is str:
        return _lower_texts(items, writer)
    code = _CODES[first]
    writer.expect_bytes(8 * len(items))
    from array import array

    try:
        numbers = array(code, items)
    except OverflowError:  # an integer of more than 64 bits
        return None
    if sys.byteorder == "big":
        numbers.byteswap()
    writer.add_unfolded(len(items))
    return ["numbers", code, writer.add_buffer(numbers.tobytes())], (), True


_CODES = {int: "q", float: "d"}


def _make_numbers(reader: Reader, children: list[Any], code: str, number: int) -> list[Any]:
    from array import array

    if code not in ("q", "d"):
        raise DecodeError("a numbers node holds neither integers nor floats")
    numbers = array(code)
    numbers.frombytes(reader.take_buffer(number))
    if sys.byteorder == "big":
        numbers.byteswap()
    reader.add_unfolded(len(numbers))
    return numbers.tolist()


def _lower_texts(items: list[str], writer: Writer) -> Lowered | None:
    from array import array

    writer.expect_bytes(8 * len(items))
    lengths = array("Q", map(len, items))
    if sum(lengths) > writer.limits.total_bytes:
        writer.expect_bytes(sum(length for length in lengths if length <= MAX_INLINE_BYTES))
        return None  # joined they would take far more than can be sent; they may be one text, a thousand times
    if sys.byteorder == "big":
        lengths.byteswap()
    writer.add_unfolded(len(items))
    text = writer.add_buffer("".join(items).encode("utf-8", "surrogatepass"))
    return ["texts", text, writer.add_buffer(lengths.tobytes())], (), True


def _make_texts(reader: Reader, children: list[Any], text_number: int, lengths_number: int) -> list[str]:
    from array import array

    text = str(reader.take_buffer(text_number), "utf-8", "surrogatepass")
    lengths = array("Q")
    lengths.frombytes(reader.take_buffer(lengths_number))
    if sys.byteorder == "big":
        lengths.byteswap()
    if sum(lengths) != len(text):
        raise DecodeError("the lengths of a texts node do not add up to its text")
    reader.add_unfolded(len(lengths))
    items, start = [], 0
    for length in lengths:
        items.append(text[start : start + length])
        start += length
    return items


def _lower_tuple(value: tuple[Any, ...], writer: Writer) -> Lowered:
    return ["tuple"], value, False


# ---------------------------------------------------------------------------------------------------------------------
# Dicts and sets


def _lower_dict(value: dict[Any, Any], writer: Writer) -> Lowered:
    return ["dict"], _flat(value), True


def _flat(value: dict[Any, Any]) -> list[Any]:
    children: list[Any] = []
    for pair in list(dict.items(value)):
        children.extend(pair)
    return children


def _fill_dict(reader: Reader, value: Any, children: list[Any], *header: object) -> Any:
    keys = children[::2]
    check_hashes(keys)
    value.update(zip(keys, children[1::2]))
    if len(value) != len(keys):
        raise DecodeError("two keys of a dict are equal")
    return value


def _lower_set(value: set[Any], writer: Writer) -> Lowered:
    return ["set"], list(value), False


def _lower_frozenset(value: frozenset[Any], writer: Writer) -> Lowered:
    return ["frozenset"], list(value), False


def _set_of(make: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def make_set(reader: Reader, children: list[Any]) -> Any:
        check_hashes(children)
        value = make(children)
        if len(value) != len(children):
            raise DecodeError("two members of a set are equal")
        return value

    return make_set


def check_hashes(keys: list[Any]) -> None:
    """Refuses keys that were chosen to collide. Raises DecodeError, and TypeError for a key without a hash."""
    hashes = list(map(hash, keys))
    if len(hashes) - len(set(hashes)) >= MAX_EQUAL_HASHES:
        from collections import Counter

        if max(Counter(hashes).values()) > MAX_EQUAL_HASHES:
            raise DecodeError("too many keys have the same hash")


def keys_of(tag: str, children: Sequence[object]) -> Sequence[object]:
    """Returns the children of a node with one of KEYED_TAGS that must be hashable and different."""
    return children if tag in _SET_TAGS else children[::2]


# ---------------------------------------------------------------------------------------------------------------------
# Containers of `collections`

_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set, frozenset, bytes)}


def _lower_ordered_dict(value: Any, writer: Writer) -> Lowered:
    children: list[Any] = []
    for key in list(value):  # its own order, which can differ from that of the underlying dict
        children += (key, dict.__getitem__(value, key))
    return ["ordereddict"], children, True


def _open_ordered_dict() -> Any:
    from collections import OrderedDict

    return OrderedDict()


def _lower_default_dict(value: Any, writer: Writer) -> Lowered | None:
    """Lowers a defaultdict whose factory is in the closed list; any other factory is code, which is not carried."""
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and (type(name) is not str or _FACTORIES.get(name) is not factory):
        return None
    return ["defaultdict", name], _flat(value), True


def _open_default_dict(factory: str | None) -> Any:
    from collections import defaultdict

    return defaultdict(None if factory is None else _FACTORIES[factory])


def _lower_counter(value: Any, writer: Writer) -> Lowered:
    return ["counter"], _flat(value), True


def _open_counter() -> Any:
    from collections import Counter

    return Counter()


def _fill_counter(reader: Reader, value: Any, children: list[Any]) -> Any:
    dict.update(value, _fill_dict(reader, {}, children))  # its own update() would add
    return value


def _lower_deque(value: Any, writer: Writer) -> Lowered:
    return ["deque", value.maxlen], list(value.copy()), True


def _open_deque(maxlen: int | None) -> Any:
    from collections import deque

    return deque(maxlen=maxlen)


def _fill_deque(reader: Reader, value: Any, children: list[Any], maxlen: int | None) -> Any:
    if maxlen is not None and len(children) > maxlen:
        raise DecodeError("a deque holds more than its own limit")
    value.extend(children)
    return value


def _fill_list(reader: Reader, value: list[Any], children: list[Any]) -> list[Any]:
    value.extend(children)
    return value


LOWER = {
    list: _lower_list,
    tuple: _lower_tuple,
    dict: _lower_dict,
    set: _lower_set,
    frozenset: _lower_frozenset,
}
LOWER_BY_NAME = {
    ("collections", "OrderedDict"): _lower_ordered_dict,
    ("collections", "defaultdict"): _lower_default_dict,
    ("collections", "Counter"): _lower_counter,
    ("collections", "deque"): _lower_deque,
}
KINDS = {
    "list": Kind(_fill_list, children=ANY_NUMBER, open=list),
    "numbers": Kind(_make_numbers, header=(str, int)),
    "texts": Kind(_make_texts, header=(int, int)),
    "tuple": Kind(lambda reader, children: tuple(children), children=ANY_NUMBER),
    "dict": Kind(_fill_dict, children=PAIRS, open=dict),
    "set": Kind(_set_of(set), children=ANY_NUMBER),
    "frozenset": Kind(_set_of(frozenset), children=ANY_NUMBER),
    "ordereddict": Kind(_fill_dict, children=PAIRS, open=_open_ordered_dict),
    "defaultdict": Kind(_fill_dict, header=((str, NoneType),), children=PAIRS, open=_open_default_dict),
    "counter": Kind(_fill_counter, children=PAIRS, open=_open_counter),
    "deque": Kind(_fill_deque, header=((int, NoneType),), children=ANY_NUMBER, open=_open_deque),
}
