"""Variables are set and read between executions, all or none."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest

from executor_api.values import OpaqueValue, encode
from executor_server.core.errors import InvalidRequest, NotFound
from executor_server.core.model import BlobRef, ShippedTool, ToolSpec
from tests.contract.harness import Harness, get_variables, pieces, set_variables
from tests.contract.marks import promise


@promise("run-variables")
async def test_values_arrive_and_return(harness: Harness) -> None:
    session = await harness.session()
    array = np.arange(400_000, dtype=np.float64)
    await set_variables(session, number=1, text="ü", array=array, nested={"a": [1, (2, {3})]})
    run = await harness.run(session, "array *= 2\n(number, text, nested, array.sum())")
    assert run.output == (1, "ü", {"a": [1, (2, {3})]}, float(array.sum() * 2))
    read, missing = await get_variables(session, "array", "number", "absent")
    assert (read["array"] == array * 2).all() and read["number"] == 1
    assert missing == ("absent",)


@promise("run-value", "run-blobs")
async def test_a_large_output_travels_whole(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "import numpy as np\nnp.arange(500_000)")
    assert (run.output == np.arange(500_000)).all()


@promise("run-variables")
async def test_without_names_all_plain_variables_are_read(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import math\nx = 1\n_y = 2\ndef f(): pass\nclass C: pass\nc = C()")
    read, _ = await get_variables(session)
    assert set(read) == {"x", "c"}
    assert isinstance(read["c"], OpaqueValue)


@promise("run-variables")
async def test_values_that_the_client_pickled_are_unpickled_in_the_sandbox_only(harness: Harness) -> None:
    session = await harness.session()
    version = b"cp%d.%d\0" % sys.version_info[:2]
    packed = encode(complex, fallback=lambda value: version + pickle.dumps(value))
    await session.set_variables([("kind", packed)])
    assert (await harness.run(session, "kind is complex")).output is True


@promise("run-variables")
async def test_a_value_that_cannot_be_decoded_is_refused_and_nothing_is_set(harness: Harness) -> None:
    session = await harness.session()
    for packed, why in (
        (b"", "variable bad"),
        (b"RXV1 and then nothing", "variable bad"),
        (encode(complex, fallback=lambda _: b"cp2.7\0" + pickle.dumps(1)), "pickled by cp2.7"),
        (encode(complex, fallback=lambda _: b"cp%d.%d\0no pickle" % sys.version_info[:2]), "variable bad"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            await session.set_variables([("good", encode(1)), ("bad", packed)])
    assert (await harness.run(session, "('good' in globals(), 'bad' in globals())")).output == (False, False)


@promise("run-variables-hostile")
async def test_a_value_whose_decoding_kills_the_interpreter_is_refused(harness: Harness) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            import os

            return os._exit, (3,)

    session = await harness.session()
    version = b"cp%d.%d\0" % sys.version_info[:2]
    packed = encode(Deadly(), fallback=lambda value: version + pickle.dumps(value))
    with pytest.raises(InvalidRequest, match="died"):
        await session.set_variables([("bad", packed)])
    assert (await harness.run(session, "1")).ended.generation == 2


@promise("run-variables-hostile")
async def test_a_repr_that_raises_or_lies_is_only_text(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "class C:\n    def __repr__(self):\n        raise ValueError\nC()")
    assert run.outcome == "succeeded" and isinstance(run.output, OpaqueValue)


@promise("run-blobs")
async def test_a_blob_is_named_once(harness: Harness) -> None:
    session = await harness.session()
    packed = encode("text")
    blob = BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))
    await session.set_variables([("x", blob)])
    with pytest.raises(NotFound, match="did not arrive"):
        await session.set_variables([("x", blob)])


@promise("run-blobs")
async def test_a_refused_request_keeps_no_blob(harness: Harness) -> None:
    """They stayed for the life of the session, which took no large value any more when they filled its room."""
    session = await harness.session()
    packed = encode("text")
    missing = BlobRef("0" * 32, len(packed))
    for refused in ("variables", "tools"):
        blob = BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))
        with pytest.raises(NotFound, match="did not arrive"):
            if refused == "variables":
                await session.set_variables([("x", missing), ("y", blob)])
            else:
                tools = [
                    ToolSpec(name, "", (), False, ShippedTool(part)) for name, part in (("x", missing), ("y", blob))
                ]
                await session.register_tools(tools)
        with pytest.raises(NotFound, match="did not arrive"):
            await session.set_variables([("y", blob)])


@promise("run-blobs")
async def test_many_blobs_are_set_at_once(harness: Harness) -> None:
    session = await harness.session()
    packed, listed = encode("text"), list[tuple[str, BlobRef]]()
    for number in range(100):
        listed.append((f"x{number}", BlobRef(await session.upload_blob(len(packed), pieces(packed)), len(packed))))
    await session.set_variables(listed)
    assert (await harness.run(session, "x0 + x99")).output == "texttext"


@promise("run-blobs")
async def test_a_blob_of_another_size_than_announced_is_refused(harness: Harness) -> None:
    session = await harness.session()
    for sent in (b"short", b"much too long" * 10):
        with pytest.raises(InvalidRequest, match=r"announced 20|20 bytes (that the header )?declare"):
            await session.upload_blob(20, pieces(sent))
    assert (await harness.run(session, "1")).output == 1


@promise("run-variables")
async def test_an_error_in_the_repr_of_one_variable_spoils_no_other(harness: Harness) -> None:
    session = await harness.session()
    for raised in ("SystemExit(3)", "KeyboardInterrupt()", "BaseException('x')", "ValueError()"):
        code = f"class C:\n    def __repr__(self):\n        raise {raised}\na = 1\nbad = C()\nmany = [C(), 2]\nz = 3"
        await harness.run(session, code)
        read, _ = await get_variables(session)
        assert (read["a"], read["z"], read["many"][1]) == (1, 3, 2)
        assert raised.partition("(")[0] in read["bad"].repr


@promise("run-variables-hostile")
async def test_a_variable_that_cannot_say_its_class_spoils_no_other(harness: Harness) -> None:
    """As Django's SimpleLazyObject with a factory that raises: asking for its class lost all variables."""
    session = await harness.session()
    await harness.run(
        session,
        "class Lazy:\n    __class__ = property(lambda self: 1 / 0)\n"
        "class Name(str):\n    __len__ = lambda self: 1 / 0\n"
        "lazy, whole = Lazy(), 1; globals()[Lazy()] = globals()[Name('name')] = 2",
    )
    read, _ = await get_variables(session)
    assert (read["whole"], type(read["lazy"])) == (1, OpaqueValue)
    assert (await harness.run(session, "whole")).output == 1


@promise("run-variables")
async def test_the_str_of_a_value_arrives_beside_its_repr(harness: Harness) -> None:
    session = await harness.session()
    code = "class Graph:\n    def __str__(self):\n        return 'Graph with 3 nodes'\nGraph()"
    output = (await harness.run(session, code)).output
    assert str(output) == "Graph with 3 nodes"
    assert "object at 0x" in output.repr
