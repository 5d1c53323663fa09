"""The checks of quotas: each returns, or raises ResourceExhausted with the time at which to try again."""

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
            f"quota {quota}: {most} at one time, and so many there are; one more can be when one has ended",
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
    """Refuses a tenant that holds as many as it leaves free; at the limit of the whole another check refuses.

    `is_shared` returns True when there are other tenants; it is called only where that decides.
    """
    if 0 < capacity - all_there <= there and is_shared():
        raise refusal(
            Reason.QUOTA_EXCEEDED,
            f"quota {quota} is not set, so a tenant leaves as many free for others as it has: it has {there}, and of "
            f"{capacity} there are {capacity - all_there} left",
            retry_after_s=retry_after_s,
        )


def check_window(quota: str, window: Window, most: float | None, now_s: float) -> None:
    if most is None or window.total(now_s) < most:
        return
    wait_s = window.wait_s(most, now_s)
    raise ResourceExhausted(
        Reason.QUOTA_EXCEEDED,
        f"quota {quota}: {most:g}, and {window.total(now_s):g} are used; there is room again in {math.ceil(wait_s)} s",
        retry_after_s=wait_s,
    )
