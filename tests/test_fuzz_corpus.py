"""What coverage-guided fuzzing found worth keeping, read again: see fuzz/fuzz_readers.py for how it came to be."""

import logging
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from fuzz_readers import READERS, replay

CORPUS = Path(__file__).parent / "fuzz" / "corpus"

IN_ORDER = {
    "gguf": {"bpe.gguf", "sentencepiece.gguf", "gemma.gguf"},
    "trace": {"engine.jsonl", "simulated.jsonl", "keyframe.jsonl", "gzipped.jsonl"},
}
"""Files that nothing is wrong with: a reader that refuses everything would pass as well."""


@pytest.mark.parametrize("kind", READERS)
def test_every_file_is_read_or_refused_by_name(kind, tmp_path, caplog):
    """One file for each way to be refused that was found, the smallest; each is also read when cut in half."""
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
