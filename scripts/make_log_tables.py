"""Write the tables of the columns of logs into docs/fleet.md: ``scripts/make_log_tables.py``. ``--check`` compares."""

from __future__ import annotations

from pathlib import Path

from generated_files import replaced, rule_cells, write_or_check

from workbench.simulation.log_tables import CONVERSATION_RULES, RULES, TURN_RULES
from workbench.trace.formats.kv_events.events import EVENT_RULES
from workbench.trace.formats.otlp import ATTRIBUTE_RULES
from workbench.trace.formats.vcr import META_RULES, REQUEST_RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fleet.md"
BEGIN, END = "<!-- begin columns -->\n", "<!-- end columns -->\n"

TABLES = {
    "a log": RULES,
    "a conversation": tuple(rule for rule in CONVERSATION_RULES if rule not in RULES),
    "a turn of it": TURN_RULES,
    "vllm-vcr, header": META_RULES,
    "vllm-vcr": REQUEST_RULES,
    "a span, attributes": ATTRIBUTE_RULES,
    "a KV event": EVENT_RULES,
}


def table() -> str:
    """The rules, in the order in which they are tried."""
    lines = ["| in | names | verdict | because |", "|---|---|---|---|"]
    for place, rules in TABLES.items():
        lines += [f"| {place} | {keys} | {rest} |" for keys, _, rest in map(rule_cells, rules)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, table(), END)
    raise SystemExit(write_or_check(__doc__, [(PAGE, page)], "the readers of logs"))
