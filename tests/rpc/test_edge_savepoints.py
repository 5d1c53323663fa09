"""The calls about savepoints at the edge: what they carry, and what they refuse."""

from __future__ import annotations

from executor_api.limits import SAVEPOINT_NUMBER_MAX
from executor_api.v1 import executor_service_pb2 as pb
from executor_server.core import BranchEnd, Changes, Event, Outcome, Result, VariablesState
from tests.rpc.edge import AUTH, Edge, refusal

LISTED = [
    {"number": 3, "made_s": 1.5, "files": 2, "file_bytes": 10, "left_out": ["sockets"]},
    {"number": 4, "made_s": 2.5, "files": 0, "file_bytes": 0, "left_out": []},
]


def listed(savepoints: object) -> list[dict[str, object]]:
    return [
        {
            "number": each.number,
            "made_s": each.made_time.ToNanoseconds() / 1e9,
            "files": each.files,
            "file_bytes": each.file_bytes,
            "left_out": list(each.left_out),
        }
        for each in savepoints  # type: ignore[attr-defined]
    ]


async def test_savepoints_are_taken_listed_and_gone_back_to(edge: Edge) -> None:
    session = await edge.session()
    taken = await edge.stub.TakeSavepoint(pb.TakeSavepointRequest(session_id="s1"), metadata=AUTH)
    assert (listed(taken.savepoints), taken.dropped) == (LISTED, 1)
    back = await edge.stub.Rollback(pb.RollbackRequest(session_id="s1", savepoint=4), metadata=AUTH)
    assert (listed(back.savepoints), back.dropped, back.generation) == (LISTED, 1, 7)
    assert list(back.left_out) == ["a file"]
    found = await edge.stub.ListSavepoints(pb.ListSavepointsRequest(session_id="s1"), metadata=AUTH)
    assert listed(found.savepoints) == LISTED
    assert session.asked == ["take savepoint", ("roll back", 4), "list savepoints"]


async def test_what_is_no_number_of_a_savepoint_is_refused(edge: Edge) -> None:
    session = await edge.session()
    request = pb.RollbackRequest(session_id="s1", savepoint=SAVEPOINT_NUMBER_MAX + 1)
    found = await refusal(edge.stub.Rollback(request, metadata=AUTH))
    assert (found.code.name, found.reason, list(found.fields)) == ("INVALID_ARGUMENT", "INVALID_FIELD", ["savepoint"])
    assert session.asked == []


async def test_an_execution_in_a_branch_says_so_and_its_result_what_it_has_changed(edge: Edge) -> None:
    session = await edge.session()
    changes = Changes(("new",), ("x",), ("gone",), ("large",), truncated=True)
    end = BranchEnd(7, "", "", changes, Changes(), ("open sockets: 1",))
    session.next_execution.events_to_send = [Event(1, Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1, branch=end))]
    request = pb.ExecuteRequest(session_id="s1", execution_id="e1", code="x", branch=True)
    events = [response.event async for response in edge.stub.Execute(request, metadata=AUTH)]
    branch = events[-1].result.branch
    assert session.asked[-1][-1] == "branch"
    assert (branch.number, list(branch.left_out)) == (7, ["open sockets: 1"])
    assert list(branch.variables.added) == ["new"]
    assert list(branch.variables.changed) == ["x"]
    assert list(branch.variables.removed) == ["gone"]
    assert list(branch.variables.unknown) == ["large"]
    assert branch.variables.truncated
    assert branch.HasField("files")


async def test_a_branch_has_no_savepoint_before_it(edge: Edge) -> None:
    session = await edge.session()
    request = pb.ExecuteRequest(session_id="s1", execution_id="e1", code="x", branch=True, savepoint=True)
    found = await refusal(edge.stub.Execute(request, metadata=AUTH).read())
    assert (found.code.name, list(found.fields)) == ("INVALID_ARGUMENT", ["branch"])
    assert session.asked == []
