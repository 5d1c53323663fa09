"""Fixtures, doubles and helpers that several folders of tests share."""
