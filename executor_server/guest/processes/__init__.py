"""Processes that calls start in the sandbox next to executions: commands and terminals.

It forks them, owns their pipes and terminals, sends their output as far as the daemon has room for it, and reports
their ends. It must not know executions, nor the interpreter; which processes are spared when an interpreter is replaced
is read from here.
"""
