"""Shows recordings, runs them again, and compares them.

`timeline` turns a recording into frames for people; `transcript` writes them for a terminal, `page` as HTML. `again`
runs a recording in a new session, and `comparison` finds the first difference. A recording is a hostile file: each text
of it is bounded by its reader, and escaped by its writer.
"""
