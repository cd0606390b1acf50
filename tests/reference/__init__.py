"""Slow, obviously right versions, used as oracles by the tests."""
