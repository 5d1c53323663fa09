"""What a console with `--actions` can do: end a session, cancel a step, drain, take sessions again, reload.

Each action has a page that says what will happen, and a form. The daemon decides whether the console's token may do it,
and its refusal is shown as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.console import Console

MOVE_TIME_S = 3600.0
"""Seconds for moving all sessions of a node: each may have gigabytes of files."""


@dataclass(frozen=True)
class Action:
    """`needs` and `takes` are the values that must and may be given; `do` returns sentences for the result."""

    title: str
    effect: str
    do: Callable[[Any, Mapping[str, str]], Awaitable[list[str]]]
    """Gets AdminService and the values. Raises DaemonError."""
    back: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


async def _end(admin: Any, values: Mapping[str, str]) -> list[str]:
    await admin.KillSession(admin_pb.KillSessionRequest(session_id=values["session"]))
    return ["The session has ended, and its sandbox is destroyed."]


async def _cancel(admin: Any, values: Mapping[str, str]) -> list[str]:
    request = admin_pb.StopExecutionRequest(session_id=values["session"], execution_id=values["execution"])
    await admin.StopExecution(request)
    return ["The step is being cancelled. Its result will say that an administrator stopped it."]


async def _drain(admin: Any, values: Mapping[str, str]) -> list[str]:
    move = values.get("move") == "yes"
    request = admin_pb.DrainRequest(node=values.get("node", ""), move=move)
    answer = await (admin.Drain(request, MOVE_TIME_S) if move else admin.Drain(request))
    moved = [
        f"{each.session_id} was moved to {each.new_session_id}. {each.problem}"
        if each.new_session_id
        else f"{each.session_id} was not moved: {each.problem}"
        for each in answer.moved
    ]
    are = "were" if move else "are"  # counted before they were moved
    return [f"No new sessions are taken. There {are} {answer.sessions}, of which {answer.busy} {are} busy.", *moved]


async def _resume(admin: Any, values: Mapping[str, str]) -> list[str]:
    await admin.Drain(admin_pb.DrainRequest(resume=True, node=values.get("node", "")))
    return ["New sessions are taken again."]


async def _reload(admin: Any, _values: Mapping[str, str]) -> list[str]:
    answer = await admin.Reload(admin_pb.ReloadRequest())
    is_new = "is now" if answer.changed else "is as before:"
    return [f"The policy {is_new} version {answer.version}, fingerprint {answer.fingerprint}."]


ACTIONS = {
    "end": Action(
        "End the session",
        "Running and waiting steps are cancelled, and the sandbox is destroyed with all variables and files.",
        _end,
        "/sessions",
        needs=("session",),
    ),
    "cancel": Action(
        "Cancel the step",
        "The code is interrupted, and killed if it does not stop. The session goes on.",
        _cancel,
        "/sessions",
        needs=("session", "execution"),
    ),
    "drain": Action(
        "Drain",
        "No new sessions are taken. Existing ones go on.",
        _drain,
        "/fleet",
        takes=("node", "move"),
    ),
    "resume": Action("Take sessions again", "New sessions are taken again.", _resume, "/fleet", takes=("node",)),
    "reload": Action(
        "Reload",
        "The policy file and the tokens are read again. If they have a problem, nothing changes, and it is shown.",
        _reload,
        "/policy",
    ),
}
"""By the last part of their path, `/actions/NAME`."""


def routes(console: Console) -> list[BaseRoute]:
    async def confirm(request: Request) -> Response:
        name, action = _action(request)
        values = _values(action, request.query_params)
        return console.page(request, "action.html", name=name, action=action, values=values)

    async def act(request: Request) -> Response:
        _, action = _action(request)
        said = await action.do(console.daemon.admin, _values(action, request.state.form))
        return console.page(request, "action_done.html", title=action.title, said=said, back=action.back)

    def _action(request: Request) -> tuple[str, Action]:
        console.require_actions()
        name = request.path_params["name"]
        if name not in ACTIONS:
            raise HTTPException(404, "There is no such action.")
        return name, ACTIONS[name]

    return [Route("/actions/{name}", confirm), Route("/actions/{name}", act, methods=["POST"])]


def _values(action: Action, given: Mapping[str, Any]) -> dict[str, str]:
    values = {name: given[name] for name in (*action.needs, *action.takes) if given.get(name)}
    if missing := [name for name in action.needs if name not in values]:
        raise HTTPException(400, f"The link is not whole: it lacks {', '.join(missing)}.")
    return {name: str(value) for name, value in values.items()}
