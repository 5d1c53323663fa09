"""The composition root and the command line: builds the daemon's parts from its configuration, runs them, stops them.

It is imported by nothing. Read `daemon.py` first, then `cli/__init__.py`.
"""
