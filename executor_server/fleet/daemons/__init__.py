"""Builds and runs a front, and the parts that make a daemon a node."""
