"""Coverage-guided fuzzing of the readers of files that come from elsewhere: GGUF files and traces.

Run: `python tests/fuzz/fuzz_readers.py gguf FOLDER tests/fuzz/corpus/gguf -max_total_time=300`, and the same with
`trace`. Needs PyPI atheris; the arguments after the kind are libFuzzer's: what it finds goes to the first folder.
`replay` is what a test does with the corpus.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MAX_STEPS_LOOKED_AT = 20


def read_gguf(path: Path) -> bool:
    """Read a file, every tensor of it, its configuration and its tokenizer; False where it is refused by name."""
    from workbench.models.gguf_file import GGUFError, GGUFFile
    from workbench.models.gguf_loader import gguf_config
    from workbench.models.gguf_tokenizer import GGUFTokenizer
    from workbench.models.tokenizer import ChatTemplateError

    try:
        file = GGUFFile(path)
        for tensor in file.tensors.values():
            tensor.float32()
        gguf_config(file)
        tokenizer = GGUFTokenizer(file.metadata)
        tokenizer.decode(tokenizer.encode("the end"))
    except (GGUFError, ChatTemplateError, FileNotFoundError):
        return False
    return True


def read_trace(path: Path) -> bool:
    """Read a trace and look at its steps, pool and metrics; False where it is refused by name."""
    from workbench.trace import Trace, TraceError

    try:
        trace = Trace.load(path)
    except TraceError:
        return False
    repr(trace)
    for index in range(min(len(trace), MAX_STEPS_LOOKED_AT)):
        record = trace[index]
        _ = record.positions, record.slot_mapping, record.block_tables, record.events, record.not_scheduled
    if len(trace) and 0 < (trace.num_blocks or 0) < 10_000:
        _ = trace.pool_state(-1, "end").free_queue
    repr(trace.metrics())
    return True


READERS: dict[str, tuple[str, Callable[[Path], bool]]] = {"gguf": (".gguf", read_gguf), "trace": (".jsonl", read_trace)}


def replay(kind: str, data: bytes, folder: Path) -> bool:
    """Read these bytes as a file of a kind; False where they are refused. Any exception is a finding."""
    suffix, read = READERS[kind]
    path = folder / f"fuzzed{suffix}"
    path.write_bytes(data)
    return read(path)


def main() -> None:
    """Fuzz one of the readers until libFuzzer's limits are reached."""
    import logging

    import atheris

    kind, *arguments = sys.argv[1:]
    if kind not in READERS:
        sys.exit(f"the first argument must be one of {', '.join(READERS)}, got {kind!r}")
    logging.disable()
    with (
        atheris.instrument_imports(include=["workbench.models", "workbench.trace"]),
        tempfile.TemporaryDirectory() as folder,
    ):
        replay(kind, b"", Path(folder))  # imports what is to be instrumented
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        atheris.Setup([sys.argv[0], *arguments], lambda data: replay(kind, data, Path(folder)) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
