"""Builds and runs a front, and what makes a daemon a node."""
