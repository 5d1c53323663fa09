"""Every feature of the table as a probe: what it is called here is what it is called in expected.toml.

A probe uses an agent on a `Place` as the guide does, and says what it saw; see observe.py.
"""

from tests.features.probes import code, files, images, limits, running, sandboxed, tools, values

__all__ = ["code", "files", "images", "limits", "running", "sandboxed", "tools", "values"]
