"""Reads, writes, lists and archives the files of the workspace, and stages the bytes of transfers.

Agent code may change the workspace at any moment, so every path is opened part by part, and no link is followed. This
package must not know executions.
"""
