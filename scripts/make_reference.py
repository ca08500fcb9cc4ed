"""Write docs/reference.md from the docstrings: ``python scripts/make_reference.py``. ``--check`` compares."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from generated_files import write_or_check

from workbench.config import EngineConfig, SamplingParams
from workbench.trace.lines import RequestInfo, Supplement
from workbench.trace.pool_change import PoolChange
from workbench.trace.readings.metrics import RequestMetrics
from workbench.trace.reasons import Reason
from workbench.trace.records import Arm, Chunk, KernelLaunch, LimitedBy, StepRecord, WorkItem

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
CONFIGURATIONS = (EngineConfig, SamplingParams)
RECORDS = (StepRecord, Chunk, Reason, PoolChange, RequestInfo, KernelLaunch, WorkItem, Supplement, RequestMetrics)
BEGINNING = """# Fields by name

The settings of a configuration and the fields of a record, written from the docstrings by `scripts/make_reference.py`.
Names are vLLM's if it has the concept, and flash-attn's for the arrays of a packed batch. Some differ from vLLM's:

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
    """Text for a cell of a table."""
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
    for of in CONFIGURATIONS:
        lines += settings(of)
    for of in RECORDS:
        lines += contents(of)
    words = {"arm": Arm, "limited_by": LimitedBy}
    lines += [f"`{name}` is one of {', '.join(f'`{word}`' for word in of.__args__)}." for name, of in words.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page or check it."""
    return write_or_check(__doc__.splitlines()[0], [(PAGE, page())], "the docstrings")


if __name__ == "__main__":
    raise SystemExit(main())
