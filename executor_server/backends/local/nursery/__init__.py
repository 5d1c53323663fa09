"""The fork server: makes sandboxes by forking a process that has imported what their interpreters need.

It owns the nurseries, one for each kind of sandbox, and says of each sandbox that it can't make why not; bubblewrap
makes that one. What runs inside a nursery is `executor_server/guest/nursery`. It must not know sessions or policies.
"""
