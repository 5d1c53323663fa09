"""Measurements of the executor, each with a reference that is measured in the same run.

`python -m benchmarks` starts a daemon of its own and prints one table. docs/performance.md says what each row means.
Nothing here passes or fails by the clock: a table says where the software stands, tests say whether it is right.
"""
