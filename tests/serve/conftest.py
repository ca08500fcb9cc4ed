"""The model of the servers."""

import random
import uuid

import pytest
from serve_helpers import make_chat_model


@pytest.fixture(scope="session")
def chat_model():
    """`make_chat_model`, made once."""
    return make_chat_model()


@pytest.fixture(autouse=True)
def same_ids_in_every_run(request, monkeypatch):
    """A request without a seed samples by its id: random ids would end an answer early in one run of many."""
    ids = random.Random(request.node.nodeid)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=ids.getrandbits(128), version=4))
