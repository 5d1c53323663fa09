"""Shares what is scarce among tenants: places, processors, and the reading of what guests send.

It must not know sessions or backends; what it divides is handed in as numbers and callbacks.
"""

from executor_server.core.fairness.cpu_shares import CpuShares
from executor_server.core.fairness.fair_semaphore import FairSemaphore
from executor_server.core.fairness.reading_shares import ReadingShares
