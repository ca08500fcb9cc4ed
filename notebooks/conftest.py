"""Notebooks run in tests at the sizes they have for slow machines."""

import os

HEADLESS = "WORKBENCH_HEADLESS"


def pytest_runtest_setup(item):
    """Before a notebook's kernel starts."""
    os.environ[HEADLESS] = "1"


def pytest_runtest_teardown(item):
    """After it has ended: the other tests run as they would for a person."""
    os.environ.pop(HEADLESS, None)
