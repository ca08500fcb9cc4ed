"""Write the table of request fields into docs/serve.md: ``scripts/make_request_table.py``. ``--check`` compares."""

from __future__ import annotations

import json
from pathlib import Path

from generated_files import write_or_check

from workbench.apps.serve.protocol import ChatRequest, CompletionRequest
from workbench.apps.serve.unread_fields import KNOWN

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serve.md"
BEGIN, END = "<!-- begin request fields -->\n", "\n<!-- end request fields -->"


def table() -> str:
    """The fields that are read, and the rules for all others, in the order in which they are tried."""
    completions, chat = CompletionRequest.__struct_fields__, ChatRequest.__struct_fields__
    both = [name for name in completions if name in chat]
    rows = [
        (both, "any", "read", "by both addresses"),
        ([name for name in completions if name not in both], "any", "read", "by `/v1/completions`"),
        ([name for name in chat if name not in both], "any", "read", "by `/v1/chat/completions`"),
    ]
    for rule in KNOWN:
        values = "any" if rule.values is None else ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
        rows.append((rule.keys.split(), values, rule.verdict, rule.because))
    lines = ["| fields | values | verdict | because |", "|---|---|---|---|"]
    for names, *rest in rows:
        lines.append(f"| {' '.join(f'`{name}`' for name in names)} | {' | '.join(rest)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    page = with_table(PAGE.read_text(encoding="utf-8"))
    raise SystemExit(write_or_check(__doc__, [(PAGE, page)], "the types of requests"))
