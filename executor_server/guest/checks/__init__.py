"""Holds agent code to the rules: imports, language, operation budget, and how its exceptions are described.

It owns the parsing, instrumentation and checking of a source, and the checks at run time behind it. It must not know
the channel, the supervisor, or how a run is driven.
"""
