"""Explains a policy to its author: the reason for a refusal, the line behind it, and the effect of a change.

For the command line only; the daemon decides without it.
"""
