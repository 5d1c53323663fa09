"""Programs that the daemon sends into its build sandboxes and runs there: CPython 3.9 and its standard library alone.

The daemon reads their text and never imports them. Each defines `main`, and talks to the daemon in lines of JSON.
"""
