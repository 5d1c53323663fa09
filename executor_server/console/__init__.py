"""The console: pages that show what the daemon does, in a process of its own.

The console is an ordinary client of AdminService with one token. It may do what the daemon lets this token do, and
everyone who has signed in shares it. Read `console.py` first, then the module of a page.
"""
