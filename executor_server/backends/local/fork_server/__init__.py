"""The fork server: makes sandboxes by forking a process that has imported what their interpreters need.

It owns the fork servers, one for each kind of sandbox, and says of each sandbox that it can't make why not; bubblewrap
makes that one. What runs inside a fork server is `executor_server/guest/fork_server`. It must not know sessions or
policies.
"""
