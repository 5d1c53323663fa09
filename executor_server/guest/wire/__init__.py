"""Messages and frames between daemon, supervisor and interpreter, and the loop and the link that carry them.

Both ends of the channel import from here: one schema (messages.py), one window of numbered frames (sequenced.py). So do
both ends of the links inside of the sandbox (link_messages.py, link.py). The daemon imports nothing else of the guest
but constants of `checks`. It must not know what the messages are about, and imports nothing of ours but
executor_api.limits. Standard library only, Python 3.9, cheap to import: no sandbox is ready before it is loaded.
"""
