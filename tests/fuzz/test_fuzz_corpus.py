"""Replay the corpus of coverage-guided fuzzing, which fuzz/fuzz_readers.py collects."""

import logging
import warnings
from pathlib import Path

import pytest
from fuzz_readers import READERS, replay

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"

IN_ORDER = {
    "gguf": {"bpe.gguf", "sentencepiece.gguf", "gemma.gguf"},
    "trace": {
        "engine.jsonl",
        "simulated.jsonl",
        "keyframe.jsonl",
        "gzipped.jsonl",
        "supplements.jsonl",
    },
}
"""Files without faults: a reader that rejects everything must not pass."""


@pytest.mark.parametrize("kind", READERS)
def test_every_file_is_read_or_rejected_by_name(kind, tmp_path, caplog):
    """The smallest file for each error that was found; each is also read after being cut in half."""
    caplog.set_level(logging.CRITICAL, "workbench")
    accepted = set()
    files = sorted((CORPUS / kind).iterdir())
    assert len(files) > 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weights of random bits overflow
        for path in files:
            data = path.read_bytes()
            if replay(kind, data, tmp_path):
                accepted.add(path.name)
            replay(kind, data[: len(data) // 2], tmp_path)
    assert accepted >= IN_ORDER[kind]
    assert len(files) - len(accepted) > 30
