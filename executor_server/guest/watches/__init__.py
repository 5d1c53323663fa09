"""Watches of directories: changes of files, gathered and reported to the daemon.

Owns the inotify descriptors, the watched directories, and the changes not yet reported. It must not know what a client
does with a change, and reads no file. Nothing here is imported before the first watch.
"""
