"""The fork server's programs: they make sandboxes by forking a process that has imported what sandboxes need.

The daemon's half is `executor_server/backends/local/fork_server`. `launch` makes the fork server's namespaces and
files, `init` is its first process, `template` its child that forks, `sandbox` what the fork does until it is a sandbox.
`owner` makes the user namespace of a fork server and, for bubblewrap, that of a sandbox, under root's daemon. They must
not know any session: its configuration goes from the daemon to the forked process itself.
"""
