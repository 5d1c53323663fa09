"""`python -m executor_server` is `executor-server`."""

from executor_server.cli import main

main()
