"""Identifies the caller: from a token, a client certificate, or the user at the other end of a Unix socket.

It owns the file of the tenants' tokens. It must not know what a principal may do: that is the policy's.
"""

from executor_server.policy.identity.identities import Identities, Shown, TenantRights, certificate_in
from executor_server.policy.identity.token_file import (
    Role,
    TokenFile,
    TokenFileError,
    TokenForm,
    TokenRecord,
    make_token,
)
from executor_server.policy.identity.tokens import TokenNews, Tokens
from executor_server.policy.identity.viewers import VIEWER, may_view
