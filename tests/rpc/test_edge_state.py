"""The state of a session at the edge: what the two calls take, and what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_server.api import service
from executor_server.core.model import StateManifest, StateOmission
from tests.rpc.edge import AUTH, Edge, refused, serving

MANIFEST = StateManifest(("a", "\ud800"), (StateOmission("b", "why"),), 2, 9, (StateOmission("l", "a link"),), "3.11.7")
WIRE = pb.StateManifest(
    variables=["a", "\\ud800"],
    omitted_variables=[pb.StateOmission(name="b", reason="why")],
    files=2,
    file_bytes=9,
    omitted_files=[pb.StateOmission(name="l", reason="a link")],
    python_version="3.11.7",
)


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with serving(tmp_path) as ready:
        yield ready


def data(content: bytes) -> pb.RestoreStateRequest:
    return pb.RestoreStateRequest(data=content)


async def test_the_archive_comes_in_pieces_and_the_manifest_last(edge: Edge) -> None:
    (await edge.session()).parts = [b"one", b"two", MANIFEST]
    got = [each async for each in edge.stub.ExportState(pb.ExportStateRequest(session_id="s1"), metadata=AUTH)]
    assert [each.data for each in got[:2]] == [b"one", b"two"] and got[2].manifest == WIRE


async def test_an_archive_is_restored_and_the_manifest_answered(edge: Edge) -> None:
    session = await edge.session()
    session.parts = [MANIFEST]
    messages = (pb.RestoreStateRequest(session_id="s1"), data(b"one"), data(b"two"))
    answer = await edge.stub.RestoreState(iter(messages), metadata=AUTH)
    assert answer.manifest == WIRE and session.asked[-1] == ("restore", b"onetwo")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [data(b"x")],
        [pb.RestoreStateRequest(session_id="s1"), pb.RestoreStateRequest(session_id="s1")],
        [pb.RestoreStateRequest(session_id="s1"), data(b"")],
        [pb.RestoreStateRequest(session_id="s1"), data(bytes(262_145))],
        [pb.RestoreStateRequest(session_id="")],
    ],
)
async def test_streams_of_another_form_are_refused(edge: Edge, messages: list[pb.RestoreStateRequest]) -> None:
    await edge.session()
    assert await refused(edge.stub.RestoreState(iter(messages), metadata=AUTH)) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_client_that_draws_it_out_is_cut_off(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STATE_TIME_S", 0.05)
    await edge.session()

    async def endless() -> AsyncIterator[pb.RestoreStateRequest]:
        yield pb.RestoreStateRequest(session_id="s1")
        await asyncio.Event().wait()

    assert await refused(edge.stub.RestoreState(endless(), metadata=AUTH)) == ("RESOURCE_EXHAUSTED", "TOO_SLOW")
