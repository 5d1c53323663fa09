"""The Connect services of E2B's envd, `process.Process` and `filesystem.Filesystem`: definitions and implementations.

The definitions are E2B's and stay as they are, since clients send their names. `make proto` generates the rest.
Read `process.py` first; `calls.py` has what both services share.
"""
