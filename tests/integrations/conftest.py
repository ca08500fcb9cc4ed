"""Fixtures of recordings: a folder with settings for it, and a writer without a process."""

import os
from pathlib import Path

import pytest
from vllm_recordings import InProcessWriter

from workbench.trace.recorders import recorder


@pytest.fixture
def traces(tmp_path, monkeypatch) -> Path:
    """The folder of the recordings, with settings for it."""
    for name in [name for name in os.environ if name.startswith("WORKBENCH_TRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(tmp_path / "traces"))
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "1")
    return tmp_path / "traces"


@pytest.fixture
def in_process(traces, monkeypatch):
    monkeypatch.setattr(recorder, "WriterProcess", InProcessWriter)
