"""Requests that the policy grants only after an approval: their callers repeat them until they are decided.

A request that waits is answered with UNAVAILABLE, reason APPROVAL_PENDING and a retry delay. A denied one is a
violation of the policy that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api import checks
from executor_server.core import PolicyViolation, Principal, Reason, Unavailable
from executor_server.policy.approvals import ApprovalRequired, Approvals, Wanted

RETRY_S = 0.5
_MAX_NAMED = 8

T = TypeVar("T")


class Asking:
    """Asks for the approvals that requests to make or change a session need."""

    def __init__(self, approvals: Approvals, *, is_node: bool = False) -> None:
        """`is_node`: the front asks about new sessions and environments, and passes on only approved requests."""
        self._approvals = approvals
        self._is_node = is_node

    def decided(
        self, owner: Principal, session_id: str, request_id: str, decide: Callable[[Collection[Wanted]], T]
    ) -> T:
        """Returns the answer of `decide`, which gets the approvals that there are.

        `request_id` is that of a session or an environment to be made, else empty. Raises as `decide`, Unavailable
        while approvals are missing, and PolicyViolation when one was denied.
        """
        try:
            return decide(())
        except ApprovalRequired as required:
            wanted, wait_s = required.wanted, required.wait_s
        if self._is_node and request_id:
            return decide(wanted)
        rulings = [self._approvals.check(owner.tenant, session_id, request_id, each, wait_s) for each in wanted]
        found = list(zip(wanted, rulings, strict=True))
        denied = tuple(each.violation(ruling.reason) for each, ruling in found if ruling and not ruling.approved)
        if denied:
            if request_id:
                self.give_up(owner, request_id)
            raise PolicyViolation(denied)
        waiting = [f"{each.kind} {each.what}" for each, ruling in found if ruling is None]
        if waiting:
            more = f" and {len(waiting) - _MAX_NAMED} more" if len(waiting) > _MAX_NAMED else ""
            text = f"waits for an approval: {', '.join(waiting[:_MAX_NAMED])}{more}; repeat the request to learn of it"
            raise Unavailable(Reason.APPROVAL_PENDING, text, RETRY_S)
        return decide(wanted)

    def decided_environment(
        self,
        owner: Principal,
        request: service_pb.PrepareEnvironmentRequest,
        decide: Callable[[Collection[Wanted]], T],
    ) -> T:
        """As `decided`, for an environment; a request without an id has no approvals."""
        if not request.request_id:
            return decide(())
        return self.decided(owner, "", checks.identifier(request.request_id, "request_id"), decide)

    def done(self, owner: Principal, session_id: str, request_id: str) -> None:
        """The request has been done: its approvals are used up."""
        self._approvals.used(owner.tenant, session_id, request_id)

    def give_up(self, owner: Principal, request_id: str) -> None:
        """Withdraws the approvals of a session that will not be made."""
        self._approvals.end_session(owner.tenant, "", request_id)
