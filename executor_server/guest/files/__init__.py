"""The files of the workspace: read, written, listed, archived, and staged bytes of transfers.

Agent code may change the workspace at any moment, so every path is opened part by part, and no link is followed. This
package must not know executions.
"""
