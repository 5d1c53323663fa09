"""Bytes from an enemy: each is a DecodeError, made without much memory."""

from __future__ import annotations

import ast
import io
import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from executor_api import values
from executor_api.values import DecodeError, ValueLimits, decode, encode
from executor_api.values.packing import pack

BIG = 1 << 40
ENOUGH_BYTES = 24 << 20
HEAD = struct.Struct(">4sIQ")


def packed(tree: object, *buffers: bytes) -> bytes:
    return pack(json.dumps(tree).encode(), buffers)


def text(tree: str) -> bytes:
    return pack(tree.encode("utf-8", "surrogatepass"), [])


def array(dtype: object, shape: object, data: object = "", order: object = "C") -> list[object]:
    return ["np.array", dtype, shape, order, data]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, end: bytes = chunk(b"IEND", b"")) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + end


def file_of(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, kind)
    return file.getvalue()


PIXELS = chunk(b"IDAT", zlib.compress(b"\0" * 20))
INDEX = ["pd.rangeindex", 0, 2, 1, None]
TWO = array("<i8", [2], "AAAAAAAAAAAAAAAAAAAAAA==")
MASK = array("|b1", [2], "AAA=")

PACKING = {
    "empty": b"",
    "short": b"RXV1\0\0",
    "other magic": HEAD.pack(b"RXV2", 0, 1) + b"1",
    "tree past the end": HEAD.pack(b"RXV1", 0, 2) + b"1",
    "tree before the end": HEAD.pack(b"RXV1", 0, 1) + b"11",
    "tree length of 64 bits": HEAD.pack(b"RXV1", 0, 2**64 - 1) + b"1",
    "four billion buffers": HEAD.pack(b"RXV1", 2**32 - 1, 1) + b"1",
    "buffer past the end": HEAD.pack(b"RXV1", 1, 1) + struct.pack(">Q", 5) + b"1",
    "lengths that wrap around": HEAD.pack(b"RXV1", 2, 1) + struct.pack(">QQ", 2**63, 2**63) + b"1",
}
TREES = {
    "no tree": text(""),
    "not JSON": text("[1"),
    "two trees": text("1 1"),
    "not UTF-8": pack(b'"\xff"', []),
    "surrogates": text('"\ud800"'),
    "NaN": text("NaN"),
    "Infinity": text("-Infinity"),
    "object": text('{"a": 1}'),
    "object in a list": text('["list", {}]'),
    "object in a header": text('["decimal", {}]'),
    "a million brackets": text("[" * 1_000_000),
    "a million braces": text('{"":' * 1_000_000),
    "deep": text("[" * 100_000 + "]" * 100_000),
    "deep, mixed and closed": text('[{"a":' * 5_000 + "1" + "}]" * 5_000),
    "deep lists": text('["list",' * 201 + '["list"]' + "]" * 201),
    "brackets that only strings hide": text('["list",' * 300 + '"]]]\\"]"' + "]" * 300),
    "a float out of range": text("1e999"),
    "a float out of range, behind text": text('["list", "' + "x" * 100 + '", -1.5E+400]'),
    "an integer of 64 bits": text("9223372036854775808"),
    "half a surrogate pair": text(r'["list", "\\\ud800\ud83d\ude00"]'),
    "the other half": text(r'"\ude00"'),
    "many digits": text("1" * 1_000_000),
    "many digits of a float": text("0." + "1" * 1_000_000),
    "many digits behind text": text('["list", "' + "1" * 100 + '", ' + "1" * 5_000 + "]"),
    "seven million values": text("[" + "1," * 7_000_000 + "1]"),
}
NODES = {
    "empty node": [],
    "number as a tag": [1],
    "list as a tag": [["list"]],
    "null as a tag": [None],
    "unknown tag": ["object"],
    "pickle as a tag": ["pickle", "gASVAAAAAAAAAAA="],
    "reference to itself": ["ref", 0],
    "reference to what comes": ["list", ["ref", 1], ["list"]],
    "negative reference": ["list", ["ref", -1]],
    "reference by text": ["list", ["ref", "0"]],
    "reference by truth": ["list", ["ref", True]],
    "reference with more": ["list", ["ref", 0, 0]],
    "reference into an open tuple": ["tuple", ["ref", 0]],
    "reference into an open set": ["set", ["tuple", ["ref", 0]]],
    "key without a value": ["dict", 1],
    "key without a hash": ["dict", ["list"], 1],
    "key without a hash, inside": ["dict", ["tuple", ["list"]], 1],
    "equal keys": ["dict", 1, 2, 1, 3],
    "keys that are equal across types": ["dict", 1, 2, True, 3],
    "member without a hash": ["set", ["dict"]],
    "equal members": ["set", 0, False],
    "member that is the dict itself": ["dict", "a", ["frozenset", ["ref", 0]]],
    "keys of one hash": ["set", *(["int", f"{n * (2**61 - 1):x}"] for n in range(1, 300))],
    "str of no base64": ["str", "é"],
    "str of no UTF-8": ["str", "/w=="],
    "str of a negative buffer": ["str", -1],
    "bytes of a buffer that is not there": ["bytes", 0],
    "bytes of nothing": ["bytes", None],
    "int of no digits": ["int", ""],
    "int of other digits": ["int", "0x10"],
    "int of underscores": ["int", "1_0"],
    "int of too many digits": ["int", "f" * 300_000],
    "float of another word": ["float", "1"],
    "complex of words": ["complex", "1", "j"],
    "range of text": ["range", 0, "1", 1],
    "range of truths": ["range", False, 1, 1],
    "range without a step": ["range", 0, 1, 0],
    "slice of two": ["slice", 1, 2],
    "ellipsis of something": ["ellipsis", 1],
    "decimal of code": ["decimal", "__import__('os')"],
    "decimal of too many digits": ["decimal", "1" * 400_001],
    "decimal out of range": ["decimal", "1E99999999999999999999"],
    "fraction of zero": ["fraction", "1", "0"],
    "fraction of a negative": ["fraction", "1", "-1"],
    "fraction of large numbers": ["fraction", "f" * 5_000, "e" * 5_000],
    "uuid of few digits": ["uuid", "00"],
    "bytes of no base64": ["bytes", "!!"],
    "bytes of base64 with more": ["bytes", "AA==\n"],
    "bytearray of unpadded base64": ["bytearray", "AAA"],
    "complex out of range": ["complex", "1e999", "0.0"],
    "complex of another spelling": ["complex", "1.00", "0.0"],
    "moments without a unit": array("<M8", [1], "AQAAAAAAAAA="),
    "opaque value of half a pair": ["opaque", "T", "\ud800"],
    "name of half a pair": ["enum", "\udc00", "A", 1],
    "path of another class": ["path", "Path", "x"],
    "path of an attribute": ["path", "os", "x"],
    "path of a number": ["path", "PosixPath", 1],
    "date out of range": ["date", "2024-02-30"],
    "date of the year 0": ["date", "0000-01-01"],
    "date by week": ["date", "2024-W01-1"],
    "datetime with an offset": ["datetime", "2024-01-01T00:00:00+01:00", 0],
    "datetime with a fold of 2": ["datetime", "2024-01-01T00:00:00", 2],
    "datetime in a zone of no kind": ["datetime-zone", "2024-01-01T00:00:00", 0, None, "UTC"],
    "time out of range": ["time", "25:00:00", 0],
    "timedelta out of range": ["timedelta", BIG, 0, 0],
    "timezone of two days": ["timezone", 172_800, 0, None],
    "timezone with a number for a name": ["timezone", 0, 0, 1],
    "zone that climbs": ["zone", "../../../etc/passwd"],
    "zone that is absolute": ["zone", "/etc/localtime"],
    "zone with a NUL": ["zone", "UTC\0"],
    "numbers of another type": ["numbers", "u", 0],
    "numbers of half a number": ["numbers", "q", 0],
    "defaultdict of another factory": ["defaultdict", "eval"],
    "deque over its own limit": ["deque", 1, 1, 2],
    "deque of a negative limit": ["deque", -1],
    "enum with a number for a name": ["enum", "T", 1, 1],
    "record with a dunder field": ["record", "T", ["__class__"], 1],
    "record with a field that is no name": ["record", "T", ["a b"], 1],
    "record with a field of its own": ["record", "T", ["_fields"], 1],
    "record with two equal fields": ["record", "T", ["a", "a"], 1, 2],
    "record with a field too many": ["record", "T", ["a"]],
    "named tuple with a private field": ["namedtuple", "T", ["_make"], 1],
    "named tuple with a field too few": ["namedtuple", "T", [], 1],
    "foreign value": ["foreign", 0],
    "array of objects by dtype": array("|O", [1], "AAAAAAAAAAA="),
    "array of object by name": array("object", [1]),
    "array of void": array("|V1000000000", [0]),
    "array of a dtype by code": array("<f8,<f8", [0]),
    "array of huge text": array("<U999999999", [0]),
    "array of a negative shape": array("<f8", [-1]),
    "array of a shape of truths": array("|i1", [True], "AA=="),
    "array of a shape of floats": array("|i1", [1.0], "AA=="),
    "array of many dimensions": array("|i1", [1] * 33, "AA=="),
    "array of a shape that overflows": array("<f8", [2**32, 2**32]),
    "array of a huge shape of nothing": array("<f8", [0, 2**61]),
    "array larger than its bytes": array("<f8", [BIG], "AAAAAAAAAAA="),
    "array smaller than its bytes": array("|i1", [1], "AAAA"),
    "array of another order": array("|i1", [1], "AA==", "K"),
    "array of booleans that are not": array("|b1", [1], "Ag=="),
    "array of characters that are not": array("<U1", [1], "/////w=="),
    "array of fields outside": array(["fields", 4, [["a", 2, "<f8"]]], [1], "AAAAAA=="),
    "array of fields on each other": array(["fields", 8, [[f"f{n}", 0, "<i8"] for n in range(9)]], [1], "AAAAAAAAAAA="),
    "array of a negative offset": array(["fields", 8, [["a", -1, "|i1"]]], [0]),
    "array of two equal fields": array(["fields", 8, [["a", 0, "|i1"], ["a", 1, "|i1"]]], [0]),
    "array of a huge item": array(["fields", BIG, []], [0]),
    "array of a huge repetition": array(["repeated", "<f8", [BIG]], [0]),
    "array of deep fields": array(
        [
            "fields",
            1,
            [
                [
                    "a",
                    0,
                    [
                        "fields",
                        1,
                        [
                            [
                                "a",
                                0,
                                [
                                    "repeated",
                                    ["repeated", ["repeated", ["repeated", ["repeated", "|i1", [1]], [1]], [1]], [1]],
                                    [1],
                                ],
                            ]
                        ],
                    ],
                ]
            ],
        ],
        [0],
    ),
    "array of many fields": array(["fields", 1_000, [[f"f{n}", n, "|i1"] for n in range(600)]], [0]),
    "array of objects inside": array(["fields", 8, [["a", 0, "|O"]]], [1], "AAAAAAAAAAA="),
    "scalar of two": ["np.scalar", "|i1", "AAA="],
    "objects of another number": ["np.objects", [3], ["list", 1]],
    "objects of no list": ["np.objects", [1], 1],
    "objects of many": ["np.objects", [BIG, BIG], ["list"]],
    "index of a scalar": ["pd.index", None, 1, None],
    "index with a hostile frequency": ["pd.index", "__import__", TWO, None],
    "range index without a step": ["pd.rangeindex", 0, 1, 0, None],
    "multiindex of codes of floats": ["pd.multiindex", 1, ["list", None], INDEX, array("<f8", [0])],
    "multiindex of fewer parts": ["pd.multiindex", 2, ["list", None, None], INDEX],
    "range indexes that take all memory": ["list", *(["pd.rangeindex", 0, 1 << 26, 1, None] for _ in range(3))],
    "range index without end": ["pd.rangeindex", 0, ["int", "f" * 20], 1, None],
    "series of another length": ["pd.series", INDEX, array("|i1", [1], "AA=="), None, ["dict"]],
    "series of a list": ["pd.series", INDEX, ["list", 1, 2], None, ["dict"]],
    "table of another length": ["pd.frame", 3, 1, INDEX, INDEX, ["dict"], TWO],
    "table of fewer columns": ["pd.frame", 2, 2, INDEX, INDEX, ["dict"], TWO],
    "table of another shape": ["pd.block", 2, 2, INDEX, INDEX, ["dict"], TWO],
    "table of labels of none": ["pd.block", 2, 2, None, INDEX, ["dict"], TWO],
    "categories past the end": ["pd.categories", False, array("|i1", [1], "fw=="), INDEX],
    "categories before the start": ["pd.categories", False, array("|i1", [1], "gA=="), INDEX],
    "strings of numbers": ["pd.strings", "python", "NA", ["list", 1, 2], MASK],
    "strings of another storage": ["pd.strings", "evil", "NA", ["list", "a", "b"], MASK],
    "strings of a shorter mask": ["pd.strings", "python", "NA", ["list", "a"], MASK],
    "moments of numbers": ["pd.moments", False, TWO, ["timezone", 0, 0, None]],
    "masked numbers of another type": ["pd.masked", "Float64", TWO, MASK],
    "masked numbers of another name": ["pd.masked", "object", TWO, MASK],
    "periods of a hostile frequency": ["pd.periods", "a.b", TWO],
    "period of a hostile frequency": ["pd.period", "M" * 50, 1],
    "timestamp of another unit": ["pd.timestamp", 1, "Y", False, None],
    "timestamp of 70 bits": ["pd.timestamp", ["int", "f" * 18], "s", False, None],
    "interval of another side": ["pd.interval", "eval", 1, 2],
    "intervals of two lengths": ["pd.intervals", "left", INDEX, ["pd.rangeindex", 0, 3, 1, None]],
    "image of no mode": ["pil.png", "EVIL", 4, 4, ""],
    "image of too many pixels": ["pil.png", "L", 100_000, 100_000, ""],
    "image of a negative size": ["pil.raw", "F", -2, -2, "AAAAAAAAAAAAAAAAAAAAAA=="],
    "raw image of fewer bytes": ["pil.raw", "F", 2, 2, "AAAA"],
    "raw image of a PNG mode": ["pil.raw", "RGB", 1, 1, "AAAA"],
}
FILES = {
    "a JPEG": file_of("JPEG"),
    "a GIF": file_of("GIF"),
    "half a PNG": file_of("PNG")[:50],
    "a PNG and more": file_of("PNG") + b"\0",
    "a PNG of another size": png(5, 4, PIXELS),
    "a PNG that is a bomb": png(60_000, 60_000, PIXELS),
    "a PNG of text": png(4, 4, chunk(b"zTXt", b"k\0\0" + zlib.compress(b"\0" * 10**6)), PIXELS),
    "a PNG with a profile": png(4, 4, chunk(b"iCCP", b"k\0\0" + zlib.compress(b"\0" * 10**6)), PIXELS),
    "a PNG without pixels": png(4, 4),
    "a PNG of empty chunks": png(4, 4, *[chunk(b"IDAT", b"")] * 20_000, PIXELS),
    "a PNG of broken pixels": png(4, 4, chunk(b"IDAT", b"\0" * 20)),
    "a PNG of two headers": png(4, 4, png(4, 4)[8:33], PIXELS),
    "a PNG of a wrong chunk length": png(4, 4, b"\xff\xff\xff\xffIDAT" + b"\0" * 20),
    "a PNG of another mode": png(4, 4, PIXELS).replace(b"\x08\0\0\0\0", b"\x08\x02\0\0\0", 1),
}
HOSTILE = {
    **PACKING,
    **TREES,
    **{
        name: packed(node, b"12345") if name == "numbers of half a number" else packed(node)
        for name, node in NODES.items()
    },
    **{name: packed(["pil.png", "L", 4, 4, 0], data) for name, data in FILES.items()},
    "a table of many columns": packed(
        [
            "pd.frame",
            0,
            20_000,
            ["pd.rangeindex", 0, 0, 1, None],
            ["pd.rangeindex", 0, 20_000, 1, None],
            ["dict"],
            *[array("<i8", [0], "")] * 20_000,
        ]
    ),
    "many series": packed(
        [
            "list",
            *[["pd.series", ["pd.rangeindex", 0, 1, 1, None], array("<i8", [1], "AAAAAAAAAAA="), None, ["dict"]]]
            * 10_000,
        ]
    ),
    "an index of many levels": packed(
        [
            "pd.multiindex",
            200,
            ["list", *[None] * 200],
            *[["pd.rangeindex", 0, 1, 1, None]] * 200,
            *[array("|i1", [1], "AA==")] * 200,
        ]
    ),
    "many images": packed(["list", *[["pil.raw", "I", 1, 1, "AAAAAA=="]] * 20_000]),
    "many empty buffers": packed(None, *[b""] * 1_000_001),
    "one buffer twice": packed(["list", ["bytes", 0], ["bytes", 0]], b"x"),
    "one large buffer in many arrays": packed(["list", *[array("|i1", [1 << 20], 0)] * 1_000], bytes(1 << 20)),
    "texts that are longer": packed(["texts", 0, 1], b"ab", struct.pack("<Q", 3)),
    "texts of lengths that wrap around": packed(["texts", 0, 1], b"ab", struct.pack("<QQ", 2**64 - 1, 3)),
    "references that unfold without end": packed(
        ["list", ["list", "x"], *(["list", ["ref", n], ["ref", n]] for n in range(1, 60))]
    ),
    "one text a thousand times": packed(["list", ["str", 0], *[["ref", 1]] * 999], b"x" * (1 << 20)),
    "bare text a thousand times": packed(["list", ["list", "x" * (1 << 20)], *[["ref", 1]] * 999]),
    "a reference that is spelled": text(
        '["list", ["list", "' + "x" * (1 << 20) + '"]' + r',["r\u0065f", 1]' * 999 + "]"
    ),
    "an opaque value many times": packed(["list", ["opaque", "T", "x" * 2_000], *[["ref", 1]] * 135_000]),
    "array of one huge text a thousand times": packed(
        ["list", array("|S1048576", [1], 0), *[["ref", 1]] * 999], bytes(1 << 20)
    ),
    "a hash without end": packed(
        ["list", ["tuple", 1], *(["tuple", ["ref", n], ["ref", n]] for n in range(1, 60)), ["set", ["ref", 60]]]
    ),
}


@pytest.fixture(scope="module", autouse=True)
def warm_libraries() -> Iterator[None]:
    """Loads what the libraries import at their first use, so that it is not counted."""
    decode(encode([Image.new("L", (4, 4)), pd.DataFrame({"a": ["x"], "b": pd.Categorical(["u"])}), np.zeros(1)]))
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_in_little_memory(name: str) -> None:
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(DecodeError):
        decode(HOSTILE[name])
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < ENOUGH_BYTES + 2 * len(HOSTILE[name])


def test_a_value_over_total_bytes_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(DecodeError, match="limit total_bytes of 100"):
        decode(b"x" * 101, ValueLimits(total_bytes=100))


@pytest.mark.parametrize("limits", [ValueLimits(depth=2), ValueLimits(nodes=5)])
def test_a_smaller_limit_of_the_receiver_holds(limits: ValueLimits) -> None:
    with pytest.raises(DecodeError, match="limit of"):
        decode(encode([[[[1], [2]]], 3]), limits)


def test_the_codec_has_no_means_to_run_what_it_reads() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "importlib", "runpy", "code", "ast"}
    for path in Path(values.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.partition(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in forbidden, path
            elif isinstance(node, ast.Name):
                assert node.id not in {"eval", "exec", "compile", "__import__"}, path
