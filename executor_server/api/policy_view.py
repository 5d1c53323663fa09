"""The policy in force as operators see it: its text, its last change, and what it would decide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api.one_at_a_time import OneAtATime
from executor_server.core import Forbidden, InvalidRequest, Principal, Reason
from executor_server.core.config import ConfigError
from executor_server.policy import Policy, PolicyStore
from executor_server.policy.identity import may_view

MAX_QUESTION_BYTES = 64 * 1024
MAX_RULES = 256
MAX_TEXT_CHARS = 256 * 1024
"""Characters of an explanation; the rest is left out."""


class PolicyView:
    """Shows and explains the policy of a daemon or a front."""

    def __init__(self, policies: PolicyStore) -> None:
        self._policies = policies
        # One explanation at a time: a large question to a large policy takes a second of a processor.
        self._explaining = OneAtATime()

    async def show(self, rules: Sequence[str] = ()) -> admin_pb.ShowPolicyResponse:
        """Returns the policy, with the lines of `rules`. Raises InvalidRequest."""
        if len(rules) > MAX_RULES:
            raise InvalidRequest(Reason.INVALID_FIELD, f"rules: must have at most {MAX_RULES} entries", "rules")
        shown = self._shown()
        if rules:
            # Only admins ask this.
            shown.lines.extend(await self._explaining.run("", partial(self._lines, tuple(rules))))
        return shown

    def _lines(self, rules: Sequence[str]) -> list[admin_pb.PolicyLine]:
        # Imported here: it takes time, and few calls of a daemon need it.
        from executor_server.policy.explain.explanation import PolicyText, places

        source = PolicyText(self._policies.current, self._policies.content.decode(), config_text=None)
        return [
            admin_pb.PolicyLine(rule=rule, number=place.line.number, text=place.line.text, meaning=place.advice)
            for rule, place in places(source, rules).items()
            if place.line is not None
        ]

    def _shown(self) -> admin_pb.ShowPolicyResponse:
        # Imported here: no other call of a daemon needs it.
        from executor_server.policy.explain.diff import differences
        from executor_server.policy.explain.text import change_text

        policies, before = self._policies, self._policies.before
        changes = [] if before is None else differences(before.file, policies.current.file)
        return write(
            admin_pb.ShowPolicyResponse,
            policy=_ref(policies.current),
            path="" if policies.path is None else str(policies.path),
            content=policies.content.decode(),
            load_time=policies.load_time_s,
            before=None if before is None else _ref(before),
            changes=map(change_text, changes),
            lines=(),
        )

    async def explain(self, caller: Principal, tenant: str, question: str) -> admin_pb.ExplainPolicyResponse:
        """Answers a question of `executor-server policy explain`. Raises Forbidden, InvalidRequest."""
        if not may_view(caller, tenant):
            raise Forbidden(Reason.ADMIN_ONLY, f"only admins and viewers of {tenant!r} may ask this")
        if len(question.encode()) > MAX_QUESTION_BYTES:
            problem = f"question: must have at most {MAX_QUESTION_BYTES:,} bytes"
            raise InvalidRequest(Reason.INVALID_FIELD, problem, "question")
        return await self._explaining.run(caller.tenant, partial(self._explained, tenant, question or "{}"))

    def _explained(self, tenant: str, question: str) -> admin_pb.ExplainPolicyResponse:
        # Imported here: it takes time, and no other call of a daemon needs it.
        from executor_server.policy.explain.explanation import PolicyText, explain
        from executor_server.policy.explain.question import read_question
        from executor_server.policy.explain.text import answer_lines

        policies = self._policies
        try:
            asked = read_question(question)
        except ConfigError as error:
            problems = "; ".join(error.problems)
            raise InvalidRequest(Reason.INVALID_FIELD, f"question: {problems}", "question") from error
        source = PolicyText(policies.current, policies.content.decode(), config_text=None)
        explanation = explain(source, tenant, asked)
        # The name of the file alone: paths of the host are not for viewers.
        paths = ("the built-in policy" if policies.path is None else policies.path.name, "the configuration")
        text = "\n".join(answer_lines(explanation, tenant, paths))
        if len(text) > MAX_TEXT_CHARS:
            text = f"{text[:MAX_TEXT_CHARS]}\n… the rest is left out: ask for less at a time"
        return admin_pb.ExplainPolicyResponse(granted=explanation.granted is not None, text=text)


def _ref(policy: Policy) -> pb.PolicyRef:
    return pb.PolicyRef(version=policy.version, fingerprint=policy.fingerprint)
