"""The environment variables that code in a sandbox finds, whatever made the sandbox; none of the daemon's is there.

PATH is not here: where programs are is the image's business.
"""

from __future__ import annotations

import os

# Beyond this many, threads of numerical libraries only take each other's time on shared machines.
_NUMERIC_THREADS = 8


def sandbox_environment(processes: int) -> dict[str, str]:
    """For a sandbox of so many processes. Caches go to /tmp: /workspace holds only what the program wrote there."""
    threads = str(max(1, min(os.cpu_count() or 1, processes // 4, _NUMERIC_THREADS)))
    return {
        "HOME": "/workspace",
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "XDG_CACHE_HOME": "/tmp/.cache",
        "XDG_CONFIG_HOME": "/tmp/.config",
        "MPLBACKEND": "module://executor_guest.mpl_backend",
        "MPLCONFIGDIR": "/tmp/.matplotlib",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A BLAS starts a thread for each processor of the host, and on a large one meets the limit of processes.
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
