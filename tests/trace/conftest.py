"""A trace of a run."""

import pytest
from trace_helpers import one_trace


@pytest.fixture(scope="module")
def whole():
    """Twelve steps."""
    return one_trace(12)
