"""Holds tenants to their quotas, and has everything audited before it happens.

It owns the counts of what each tenant has and used, on disk too, so that a restart forgives nothing. It must not know
sessions or the wire; it implements the protocols of `lifecycle`.
"""

from executor_server.admission.controller import STOPPED_TEXT, Admission, must_stop
from executor_server.admission.quota_checks import NodeShare
from executor_server.admission.quotas import Capacity, Quotas
from executor_server.admission.usage_store import UsageStore
from executor_server.admission.window import Window
