"""`executor-server` with other values of its constants, for tests that can't wait as long as a daemon does.

python -m tests.support.tuned_daemon {"executor_server.daemon.daemon.HOST_SWEEP_INTERVAL_S": 0.2} serve …
"""

from __future__ import annotations

import importlib
import json
import sys


def tuned(**constants: float) -> tuple[str, ...]:
    """The program for `running_daemon`, with these constants of the modules named in `_HOMES`."""
    return sys.executable, "-m", __name__, json.dumps({f"{_HOMES[name]}.{name}": constants[name] for name in constants})


_HOMES = {
    "HOST_SWEEP_INTERVAL_S": "executor_server.daemon.daemon",
    "RECOVERY_S": "executor_server.api.assembly.settings",
    "DOCKER_REQUEST_TIMEOUT_S": "executor_server.backends.docker.check",
    "DOCKER_IMAGE_REFRESH_S": "executor_server.backends.docker.images",
    "E2B_REQUEST_TIMEOUT_S": "executor_server.backends.e2b.access",
}

if __name__ == "__main__":
    import executor_server.__main__  # noqa: F401 - for what it sets at a start
    from executor_server.daemon.cli import main

    for path, value in json.loads(sys.argv.pop(1)).items():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
        setattr(sys.modules[module], name, value)
    main()
