"""Explains a policy to its author: the reason for a refusal, the line behind it, and the effect of a change.

For the command line, and for operators who ask a daemon. A daemon decides without this package.
"""
