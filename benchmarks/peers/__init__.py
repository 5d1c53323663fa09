"""Measures the alternatives that a user would pick, in turns with ours: `make bench-peers`.

Each peer runs in a process and an environment of its own (`.cache/peers`), used as its documentation says, warmed up;
its versions are pinned in peers.toml. The same rows are taken of all of them and of ours, in turns. If a peer can't do
something, there is a reason instead of a figure. Next to its figures the table says what it isolates.
"""
