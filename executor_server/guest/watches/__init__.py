"""Watches of the workspace: changes of files, gathered and reported to the daemon.

Owns the inotify descriptors, the directories that they see, and what waits to be reported. It must not know what a
client does with a change, nor read any file. Nothing here is imported before the first watch.
"""
