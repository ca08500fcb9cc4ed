"""Write docs/reference.md from the docstrings: ``python scripts/make_reference.py``. ``--check`` compares."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.trace.metrics import RequestMetrics
from workbench.trace.records import Arm, Chunk, KernelLaunch, LimitedBy, RequestInfo, StepRecord, WorkItem

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
BEGINNING = """# Fields by name

What a person sets, and what a record holds; written from the docstrings by `scripts/make_reference.py`. Names are
vLLM's where it has the concept, and flash-attn's for the arrays of a packed batch. Where another word is in use:

| here | vLLM V1 |
|---|---|
| `num_kv_computed` | `num_computed_tokens` |
| `num_blocks` | `num_gpu_blocks_override` |
| `cu_seqlens_q` | `query_start_loc` |
| `seqused_k` | `seq_lens` |
"""


def attributes(of: type) -> dict[str, str]:
    """The text of each field, from the section "Attributes" of a Google-style docstring."""
    section = re.search(r"^Attributes:\n(.*?)(?:^\S|\Z)", inspect.getdoc(of) or "", re.MULTILINE | re.DOTALL)
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def cell(text: str) -> str:
    """Text that can stand in a cell of a table."""
    return re.sub(r"``(.*?)``", r"`\1`", text).replace("|", "\\|")


def settings(of: type) -> Iterator[str]:
    """A table of a configuration: field, default, meaning."""
    texts = attributes(of)
    default = of()
    yield from (f"## `{of.__name__}`", "", "| field | default | meaning |", "|---|---|---|")
    for field in dataclasses.fields(of):
        value = getattr(default, field.name)
        yield f"| `{field.name}` | `{value!r}` | {cell(texts[field.name])} |"
    yield ""


def contents(of: type) -> Iterator[str]:
    """A table of a record: field, meaning."""
    summary = (inspect.getdoc(of) or "").split("\n")[0]
    yield from (f"## `{of.__name__}`", "", cell(summary), "", "| field | meaning |", "|---|---|")
    yield from (f"| `{name}` | {cell(text)} |" for name, text in attributes(of).items())
    yield ""


def page() -> str:
    """The whole page."""
    lines = [BEGINNING]
    for of in (EngineConfig, SamplingParams):
        lines += settings(of)
    for of in (StepRecord, Chunk, RequestInfo, KernelLaunch, WorkItem, RequestMetrics):
        lines += contents(of)
    words = {"arm": Arm, "limited_by": LimitedBy}
    lines += [f"`{name}` is one of {', '.join(f'`{word}`' for word in of.__args__)}." for name, of in words.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.name} is not what the docstrings say now; run {sys.argv[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
