"""pydantic-ai, LangChain and openai against the server, as they come, over five turns.

`make test-clients` installs them into an environment, and names its Python in CLIENTS_PYTHON.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from serve_helpers import ServerProcess
from tool_templates import THINKS

PYTHON = os.environ.get("CLIENTS_PYTHON")
SCRIPT = Path(__file__).parents[1] / "support" / "client_libraries.py"


@pytest.mark.skipif(not PYTHON, reason="CLIENTS_PYTHON names no Python with these libraries: make test-clients")
def test_client_libraries_hold_conversations_with_reasoning_and_tools():
    engine = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "num_blocks": 4000,
    }
    process = ServerProcess(letters=True, template=THINKS, max_position=8192, engine=engine)
    try:
        command = [PYTHON, str(SCRIPT), str(process.port)]
        done = subprocess.run(command, capture_output=True, timeout=300, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    finally:
        process.end()
    found = json.loads(done.stdout)
    places = [*found["pydantic_ai"]["places"], found["langchain"]["place"]]
    assert len(places) == 6 and all(isinstance(place["x"], bool) for place in places)
    for turns in (found["pydantic_ai"]["turns"], found["langchain"]["turns"], found["openai"]):
        assert [bool(turn["calls"]) for turn in turns] == [False, True, False, True, False]
        assert all(isinstance(arguments["x"], bool) for turn in turns for arguments in turn["calls"])
    # LangChain drops reasoning from the answers that it gives.
    for turns in (found["pydantic_ai"]["turns"], found["openai"]):
        assert [bool(turn["reasoning"]) for turn in turns] == [True, False, True, False, True]
