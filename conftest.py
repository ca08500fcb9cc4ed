"""Loads `tests/support/tiers.py`, which decides how many cases run, for the tests and the notebooks."""

pytest_plugins = ["tiers"]
