"""The model of the servers."""

import pytest
from serve_helpers import make_chat_model


@pytest.fixture(scope="session")
def chat_model():
    """`make_chat_model`, made once."""
    return make_chat_model()
