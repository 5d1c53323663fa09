"""A small internet of the tests' own: names, an authority, a name server and servers, at an address of its own.

Everything is under `test-internet.example`, a domain that is reserved (RFC 2606). `Internet.config()` is the section of
executor.toml with which a daemon lives in it. It takes root and `ip`; where these are missing, tests that need it are
skipped with the reason.
"""
