"""pydantic-ai and LangChain against the server, as they come.

`make test-clients` installs both into an environment, and names its Python in CLIENTS_PYTHON.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from serve_helpers import ServerProcess
from test_tools import HERMES

PYTHON = os.environ.get("CLIENTS_PYTHON")
SCRIPT = Path(__file__).parents[1] / "support" / "client_libraries.py"


@pytest.mark.skipif(not PYTHON, reason="CLIENTS_PYTHON names no Python with these libraries: make test-clients")
def test_client_libraries_get_what_they_ask_for():
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 800, "max_model_len": 512}
    process = ServerProcess(letters=True, template=HERMES, engine=engine)
    try:
        command = [PYTHON, str(SCRIPT), str(process.port)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    finally:
        process.end()
    assert isinstance(found["pydantic_ai"]["x"], bool) and isinstance(found["langchain"]["place"]["x"], bool)
    assert found["langchain"]["calls"] and all(name == "look" for name, _ in found["langchain"]["calls"])
    assert all(isinstance(arguments["x"], bool) for _, arguments in found["langchain"]["calls"])
