"""The fork server: makes sandboxes by forking a process that has imported what their interpreters need.

It owns the fork servers, one for each kind of sandbox. If it can't make a sandbox, it reports the reason, and
bubblewrap makes that sandbox. The code inside a fork server is `executor_server/guest/fork_server`. It must not know
sessions or policies.
"""
