"""Sandboxes made of containers, on the Docker Engine of this host; `backend.py` is the way in."""

from executor_server.backends.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
