"""`executor-server`, which is `python -m executor_server` too."""

import gc
import os
import sys

# Modules are no garbage, and looking for some between them took a fifth of a daemon's start. Here, and not in `cli`,
# since it is for a process that runs a command only; `daemon.cli.shared.start_collector` ends it.
gc.disable()

# gRPC passes what its listener reads through three threads of its own. Without that, the thread that waits for messages
# reads them, and a call that does nothing takes a quarter less. gRPC reads this when it is first imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

try:
    from executor_server.daemon.cli import main
except ModuleNotFoundError as error:
    sys.exit(f"executor-server: {error}: pip install 'remote-executor[server]'")
except KeyboardInterrupt:
    sys.exit(130)  # as in `cli`, which handles it when it is imported

if __name__ == "__main__":
    main()
