"""The form of a token that a header can carry."""

from __future__ import annotations


def can_be_sent(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token
