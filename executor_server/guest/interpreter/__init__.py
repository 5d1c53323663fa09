"""The child process in which agent code runs and its variables live.

It owns the namespace, the tools as agent code sees them, and the images that it displays. Nothing it says is trusted
by the supervisor.
"""
