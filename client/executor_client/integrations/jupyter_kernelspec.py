"""`executor jupyter install`: writes a kernelspec, from which Jupyter lists and starts kernels in sandboxes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager

_KERNEL = "executor_client.integrations.jupyter_kernel"


def install(name: str, display_name: str, options: Mapping[str, Any], *, forwarding: bool, prefix: str | None) -> str:
    """Writes the kernelspec for this user, or below `prefix`; returns its directory. Replaces one of the same name.

    `options` are the fields of SessionOptions that are set. `forwarding`: the kernel of images without ipykernel.
    """
    spec: dict[str, Any] = {"display_name": display_name, "language": "python"}
    if forwarding:
        arguments = [f"--RemoteKernel.options={dict(options)!r}"]
        argv = [sys.executable, "-m", _KERNEL, "-f", "{connection_file}", *arguments]
        spec |= {"argv": argv, "interrupt_mode": "message"}
    else:
        argv = ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        provisioner = {"provisioner_name": "remote-executor", "config": {"options": dict(options)}}
        spec |= {"argv": argv, "interrupt_mode": "signal", "metadata": {"kernel_provisioner": provisioner}}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "kernel.json").write_text(json.dumps(spec, indent=2))
        manager = KernelSpecManager()
        return str(manager.install_kernel_spec(directory, name, user=prefix is None, prefix=prefix))
