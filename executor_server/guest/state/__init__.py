"""The variables of an interpreter as bytes for another interpreter: written and read inside sandboxes only.

It owns what a state may name. It must not know where the bytes go.
"""
