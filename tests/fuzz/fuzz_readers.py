"""Coverage-guided fuzzing of the readers of files from other sources: GGUF files and traces.

Run: `python tests/fuzz/fuzz_readers.py gguf FOLDER tests/fuzz/corpus/gguf -max_total_time=300`, and the same with
`trace`. Needs PyPI atheris; the arguments after the kind are libFuzzer's, which writes findings to the first folder. A
test calls `replay` with each file of the corpus.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MAX_STEPS_LOOKED_AT = 20


def read_gguf(path: Path) -> bool:
    """Read a file, every tensor of it, its configuration and its tokenizer; False if that raises a named error."""
    from workbench.models.gguf.file import GGUFError, GGUFFile
    from workbench.models.gguf.loader import gguf_config
    from workbench.models.gguf.tokenizer import GGUFTokenizer
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
    """Read a trace and look at its steps, supplements, pool and metrics; False if that raises a named error."""
    from workbench.trace import Trace, TraceError
    from workbench.trace.readings.contents import Contents
    from workbench.viz.layout.shadow_launch import shadow_facts

    try:
        trace = Trace.load(path)
    except TraceError:
        return False
    repr(trace)
    for index in range(min(len(trace), MAX_STEPS_LOOKED_AT)):
        record = trace[index]
        _ = record.positions, record.slot_mapping, record.block_tables, record.events, record.not_scheduled
    for supplement in trace.supplements:
        shadow_facts(supplement.facts, len(trace[supplement.step - trace[0].step].chunks))
    if len(trace) and 0 < (trace.num_blocks or 0) < 10_000:
        _ = trace.pool_state(-1, "end").free_queue
    repr(trace.metrics())
    contents = Contents(trace)
    for info in itertools.islice(trace.requests.values(), MAX_STEPS_LOOKED_AT):
        _ = contents.is_known(info), contents.prompt(info)
    repr(trace.stalls())
    return True


READERS: dict[str, tuple[str, Callable[[Path], bool]]] = {"gguf": (".gguf", read_gguf), "trace": (".jsonl", read_trace)}


def replay(kind: str, data: bytes, folder: Path) -> bool:
    """Read these bytes as a file of a kind; False if they are rejected. Any other exception is a finding."""
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
        replay(kind, b"", Path(folder))  # imports the modules to instrument
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        atheris.Setup([sys.argv[0], *arguments], lambda data: replay(kind, data, Path(folder)) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
