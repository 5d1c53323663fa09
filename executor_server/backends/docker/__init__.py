"""Sandboxes made of containers, on the Docker Engine of this host. It exports the backend; the rest is private."""

from executor_server.backends.docker.backend import DockerBackend
