"""Identifies the caller: from a token, a client certificate, or the user at the other end of a Unix socket.

It owns the file of the tenants' tokens, and the roles that a credential can have. It must not know what a session may
do: that is the policy's.
"""

from executor_server.policy.identity.identities import Identities, Shown, TenantRights, certificate_in
from executor_server.policy.identity.roles import APPROVER, USER, VIEWER, Role, effective_roles, may_decide, may_view
from executor_server.policy.identity.token_file import (
    TokenFile,
    TokenFileError,
    TokenForm,
    TokenRecord,
    make_token,
)
from executor_server.policy.identity.tokens import TokenNews, Tokens
