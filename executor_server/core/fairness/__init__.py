"""Shares scarce resources among tenants: places, processors, and the reading of data from guests.

It must not know sessions or backends: callers pass in numbers and callbacks.
"""

from executor_server.core.fairness.cpu_shares import CpuShares
from executor_server.core.fairness.fair_semaphore import FairSemaphore
from executor_server.core.fairness.reading_shares import ReadingShares
