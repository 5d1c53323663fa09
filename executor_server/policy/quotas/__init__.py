"""Holds tenants to their quotas, and has everything audited before it happens.

It owns the counts of what each tenant has and used, on disk too, so that a restart forgives nothing. It must not know
sessions or the wire; it implements the protocols of `core.lifecycle`.
"""

from executor_server.policy.quotas.controller import STOPPED_TEXT, Admission, must_stop
from executor_server.policy.quotas.quota_checks import check_capacity, check_number, check_window
from executor_server.policy.quotas.quotas import Capacity, Quotas
from executor_server.policy.quotas.usage_store import UsageStore
from executor_server.policy.quotas.window import Window
