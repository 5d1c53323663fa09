"""Messages and frames between daemon, supervisor and interpreter, and the loop and the link that carry them.

Both ends of the channel import from here: one schema (messages.py), one window of numbered frames (sequenced.py). So do
both ends of the links inside of the sandbox (link_messages.py, link.py). This package must not know what the messages
are about. Of our other code it imports only light modules of executor_api (limits, displays, strict_json). Standard
library only, Python 3.9, cheap to import: no sandbox is ready before it is loaded.
"""
