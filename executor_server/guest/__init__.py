"""The guest, which runs inside a sandbox: the supervisor (pid 1), the checker and the interpreter.

Standard library only, CPython 3.9 and later. Packed with what it uses of `executor_api` into one zipapp, as
`executor_guest`. The daemon imports `wire` from here, so that both ends of the channel share one codec. It also imports
constants of `checks`, and `egress`, which needs h11 in addition to the standard library.
"""
