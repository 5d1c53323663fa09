"""The parts of the client that need no event loop and no thread: both clients are built on them.

Owns the client's end of the wire (requests, conversion, status codes, blobs, the assembly of a result), its decisions
(retries, execution, waits), its limits, local files and archives, tools and values, and the texts that people and
models read. Almost all of it does no I/O; the modules that do (`endpoint`, `probe`, `local`, `archives`) block.

Must not know `_aio`, `_sync`, the clients and sessions above them, or any integration. It exports its modules rather
than names: gRPC and its messages take a fifth of a second to import, which `executor --help` must not pay.
"""
