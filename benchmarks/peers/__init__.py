"""Measures what a user would pick instead, beside ours: `make bench-peers`.

Each peer runs in a process and an environment of its own (`.cache/peers`), as its documentation says that it is used,
warmed up; its versions are pinned in peers.toml. The same rows are taken of all of them and of ours, in turns. What a
peer can't do is a reason instead of a figure, and what it isolates stands beside its figures.
"""
