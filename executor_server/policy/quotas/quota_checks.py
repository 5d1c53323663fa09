"""Checks of quotas. Each returns, or raises ResourceExhausted with the time to retry."""

from __future__ import annotations

import math
from collections.abc import Callable

from executor_server.core import Reason, ResourceExhausted
from executor_server.policy.quotas.window import Window


def check_number(
    quota: str,
    there: int,
    most: int | None,
    retry_after_s: float,
    refusal: type[ResourceExhausted] = ResourceExhausted,
) -> None:
    if most is not None and there >= most:
        raise refusal(
            Reason.QUOTA_EXCEEDED,
            f"quota {quota}: {there} of {most} are in use; retry when one has ended",
            retry_after_s=retry_after_s,
        )


def check_capacity(
    quota: str,
    there: int,
    all_there: int,
    capacity: int,
    is_shared: Callable[[], bool],
    retry_after_s: float,
    refusal: type[ResourceExhausted] = ResourceExhausted,
) -> None:
    """Refuses a tenant that holds at least as many as are free; another check guards the total.

    `is_shared` returns True if there are other tenants; it is called only if that decides.
    """
    if 0 < capacity - all_there <= there and is_shared():
        raise refusal(
            Reason.QUOTA_EXCEEDED,
            f"quota {quota} is not set, so a tenant must leave as many free as it holds: it holds {there}, and "
            f"{capacity - all_there} of {capacity} are free",
            retry_after_s=retry_after_s,
        )


def check_window(quota: str, window: Window, most: float | None, now_s: float) -> None:
    if most is None or window.total(now_s) < most:
        return
    wait_s = window.wait_s(most, now_s)
    raise ResourceExhausted(
        Reason.QUOTA_EXCEEDED,
        f"quota {quota}: {window.total(now_s):g} of {most:g} are used; retry in {math.ceil(wait_s)} s",
        retry_after_s=wait_s,
    )
