"""The fork server's programs: they fork sandboxes from a process that has imported what interpreters need.

The daemon's half is `executor_server/backends/local/fork_server`. `launch` makes the fork server's namespaces and
files. `init` is its first process, and `template` the child that forks. `forked_sandbox` turns a fork into a sandbox.
Under root's daemon, `owner` makes the user namespace of a fork server and, for bubblewrap, that of a sandbox. They must
not know any session: its configuration goes from the daemon to the forked process itself.
"""
