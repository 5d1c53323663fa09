"""`executor-server`, which is `python -m executor_server` too."""

import gc

# Modules are no garbage, and looking for some between them took a fifth of a daemon's start. Here, and not in `cli`,
# since it is for a process that runs a command only; `cli.shared.start_collector` ends it.
gc.disable()

from executor_server.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
