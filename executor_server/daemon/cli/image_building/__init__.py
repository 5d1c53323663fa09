"""Builds the images of the project on a Docker Engine, from a clone or an installed package.

For the command line only; the daemon never builds anything. It speaks to the Engine by the `docker` command, as a
person would, and knows nothing of the backends.
"""
