"""Processes that calls start in the sandbox next to executions: commands and terminals.

It forks them, owns their pipes and terminals, sends their output as far as the daemon has room for it, and reports
their ends. It must not know executions or the interpreter. When an interpreter is replaced, the supervisor reads from
here which processes it has to spare.
"""
