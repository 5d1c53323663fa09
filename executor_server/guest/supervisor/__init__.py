"""Pid 1 of the sandbox: drives runs, and starts, limits, measures and ends every other process of the sandbox.

It owns the channel to the daemon, the output of runs, and the deadlines. It trusts no message from the interpreter, and
must not run, parse or unpickle anything that agent code wrote. Read supervisor.py first: it makes all parts, in the
order of their dependencies.
"""
