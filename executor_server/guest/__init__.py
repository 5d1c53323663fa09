"""The guest, which runs inside a sandbox: the supervisor (pid 1), the checker and the interpreter.

Standard library only, CPython 3.9 and later. Packed with `executor_api.values` into one zipapp as `executor_guest`; the
daemon imports `frames` from here, so that both ends of the channel share one codec.
"""
