"""A package index of the tests' own, in their internet (tests/support/internet): honest, broken and hostile.

`internet.package_index()` gives a test an index of its own; `make_wheel` and hostile.py make what it offers, on the
spot. No test needs the public index.
"""
