"""The policy in force, its last change, and the explanation of what it would decide."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.console import Console
from executor_server.console.daemon import DaemonError

EXAMPLE = '{"authorized_imports": ["numpy"], "connections": ["pypi.org:443"], "tools": ["search"]}'


@dataclass(frozen=True)
class _Answer:
    text: str
    granted: bool = False
    problem: str = ""


def routes(console: Console) -> list[BaseRoute]:
    async def policy(request: Request) -> Response:
        return await _page(request, "", EXAMPLE, None)

    async def explain(request: Request) -> Response:
        tenant, question = str(request.state.form.get("tenant", "")), str(request.state.form.get("question", ""))
        try:
            answer = await console.daemon.admin.ExplainPolicy(
                admin_pb.ExplainPolicyRequest(tenant=tenant, question=question)
            )
        except DaemonError as error:
            return await _page(request, tenant, question, _Answer("", problem=error.message))
        return await _page(request, tenant, question, _Answer(answer.text, answer.granted))

    async def _page(request: Request, tenant: str, question: str, answer: _Answer | None) -> Response:
        shown, problem = None, ""
        try:
            shown = await console.daemon.admin.ShowPolicy(admin_pb.ShowPolicyRequest())
        except DaemonError as error:  # a viewer may ask for explanations only
            problem = error.message
        return console.page(
            request,
            "policy.html",
            shown=shown,
            lines=[] if shown is None else shown.content.split("\n"),
            problem=problem,
            tenant=tenant,
            question=question,
            answer=answer,
        )

    return [Route("/policy", policy), Route("/policy", explain, methods=["POST"])]
