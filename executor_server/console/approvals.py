"""Requests that wait for a person: each with the code that made it, the rule, and what a decision changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client.approvals import shown_host
from executor_server.console.console import Console
from executor_server.console.daemon import DaemonError
from executor_server.console.highlight import highlight
from executor_server.console.policy_change import policy_change

DECISIONS = {
    "once": (admin_pb.APPROVAL_DECISION_ONCE, "Approved once"),
    "session": (admin_pb.APPROVAL_DECISION_SESSION, "Approved for the session"),
    "deny": (admin_pb.APPROVAL_DECISION_DENIED, "Denied"),
}
ROWS_MAX = 100
_KINDS = {
    admin_pb.APPROVAL_KIND_HOST: "connect to",
    admin_pb.APPROVAL_KIND_PACKAGE: "install",
    admin_pb.APPROVAL_KIND_TOOL: "call the tool",
    admin_pb.APPROVAL_KIND_IMPORT: "import",
}


def routes(console: Console) -> list[BaseRoute]:
    daemon = console.daemon

    async def approvals(request: Request) -> Response:
        await daemon.known_approvals()
        return console.page(request, "approvals.html", events="/events/approvals", **_listed(console))

    async def approvals_events(request: Request) -> Response:
        return console.events(request, changes())

    async def changes() -> AsyncGenerator[tuple[str, str], None]:
        seen = -1
        while True:
            seen = await daemon.approvals_changes.after(seen)
            yield "approvals", rendered(seen)

    @lru_cache(1)
    def rendered(_change: int) -> str:
        """Renders the list once for all viewers: sandboxes may change it five times a second."""
        return console.fragment("approvals_list.html", **_listed(console))

    async def approval(request: Request) -> Response:
        found = await _waiting(request.path_params["approval_id"])
        code, missing = await _code(found)
        return console.page(
            request,
            "approval.html",
            events=f"/events/approvals/{found.approval_id}",
            approval=found,
            what=_shown(found),
            verb=_verb(found),
            code=highlight(code),
            missing=missing,
            change=policy_change(found, await _policy()),
        )

    async def approval_events(request: Request) -> Response:
        return console.events(request, end(request.path_params["approval_id"]))

    async def end(approval_id: str) -> AsyncGenerator[tuple[str, str], None]:
        """Yields an event when a request no longer waits."""
        seen = -1
        while any(each.approval_id == approval_id for each in daemon.approvals):
            seen = await daemon.approvals_changes.after(seen)
        text = "This request no longer waits: it was decided, withdrawn, or timed out."
        yield "decided", console.fragment("problem_part.html", text=text)

    async def decide(request: Request) -> Response:
        console.require_actions()
        chosen = DECISIONS.get(str(request.state.form.get("decision", "")))
        if chosen is None:
            raise HTTPException(400, "A decision is once, session or deny.")
        decision, title = chosen
        approval_id = request.path_params["approval_id"]
        found = next((each for each in daemon.approvals if each.approval_id == approval_id), None)
        await daemon.admin.DecideApproval(admin_pb.DecideApprovalRequest(approval_id=approval_id, decision=decision))
        said = [] if found is None else [f"Session {found.session_id or 'to be made'}: {_verb(found)} {_shown(found)}"]
        return console.page(request, "action_done.html", title=title, said=said, back="/approvals")

    async def _waiting(approval_id: str) -> admin_pb.Approval:
        console.require_actions()
        for each in await daemon.known_approvals():
            if each.approval_id == approval_id:
                return each
        raise HTTPException(404, "No request with this id waits: it may have been decided, withdrawn, or timed out.")

    async def _code(approval: admin_pb.Approval) -> tuple[str, str]:
        """Returns the code that made a request, or why it is not shown."""
        if not approval.execution_id:
            return "", "No code made it: the client asks for it before the session runs any."
        request = admin_pb.FollowExecutionRequest(session_id=approval.session_id, execution_id=approval.execution_id)
        try:
            async with aclosing(daemon.admin.FollowExecution(request)) as messages:
                async for message in messages:  # the first one has the code
                    return message.execution.code, 'It is shown if the profile has audit.view = "content".'
        except DaemonError as error:
            return "", error.message
        return "", "The daemon did not send it."

    async def _policy() -> str:
        """Returns the text of the policy; empty if this console's token may not read it."""
        try:
            return str((await daemon.admin.ShowPolicy(admin_pb.ShowPolicyRequest())).content)
        except DaemonError:
            return ""

    return [
        Route("/approvals", approvals),
        Route("/events/approvals", approvals_events),
        Route("/approvals/{approval_id}", approval),
        Route("/approvals/{approval_id}", decide, methods=["POST"]),
        Route("/events/approvals/{approval_id}", approval_events),
    ]


def _listed(console: Console) -> dict[str, Any]:
    daemon = console.daemon
    error = daemon.errors.get("approvals")
    return {
        "approvals": [(each, _verb(each), _shown(each)) for each in daemon.approvals[:ROWS_MAX]],
        "more": max(0, len(daemon.approvals) - ROWS_MAX),
        "problem": "" if error is None else error.message,
        "waiting": daemon.waiting,
    }


def _verb(approval: admin_pb.Approval) -> str:
    return _KINDS.get(approval.kind, "use")


def _shown(approval: admin_pb.Approval) -> str:
    """Returns what is requested: a host in punycode also with the letters it stands for, a tool with its arguments."""
    if approval.kind == admin_pb.APPROVAL_KIND_HOST:
        return shown_host(approval.what)
    return f"{approval.what}({approval.detail})" if approval.kind == admin_pb.APPROVAL_KIND_TOOL else approval.what
