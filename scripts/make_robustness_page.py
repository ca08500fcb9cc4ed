"""Write the results of the soak under attack into docs/robustness.md: `python scripts/make_robustness_page.py`.

The table between the markers comes from tests/soak/results/hostile.json, which `tests/soak/hostile.py --write` writes.
"""

import json
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "tests" / "soak" / "results" / "hostile.json"
PAGE = REPOSITORY / "docs" / "robustness.md"
BEGIN, END = "<!-- begin hostile clients -->\n\n", "\n\n<!-- end hostile clients -->"


def table(report):
    """The table of a run of tests/soak/hostile.py."""
    honest, attacks, memory = report["honest"], Counter(report["attacks"]), report["memory_mib"]
    stopped, hardships = report["honest_stopped"], report["hardships"]
    rows = {
        "minutes": f"{report['minutes']:g}",
        "honest answers, equal to the offline ones; different": (honest["equal"], honest.get("different", 0)),
        "honest requests refused because the server was full (429, 503)": (honest.get("refused or cut", 0),),
        "the same of clients in a process that was stopped and continued: equal; different": (
            stopped.get("equal", 0), stopped.get("different", 0),
        ),
        "stops of that process or of the attackers; jumps of the wall clock; the full disk's share in use": (
            hardships["processes of clients stopped and continued"], hardships.get("jumps of the clock", 0),
            hardships["share of the full disk in use"],
        ),
        "cache folders that others could write: refused; used": (
            hardships.get("open cache folders refused", 0), hardships.get("open cache folders USED", 0),
        ),
        "clients that left behind bytes of a next request; pipelined 50 requests and left": (
            attacks["leave_behind_bytes"], attacks["pipeline_and_leave"],
        ),
        "bursts of 600 connections; of 20 pages of the dashboard and 20 of its websockets": (
            attacks["hold_connections"], attacks["load_dashboards"],
        ),
        "readers that never read: of answers, of the trace, of the dashboard": (
            attacks["never_read_an_answer"], attacks["never_read_the_trace"], attacks["never_read_the_dashboard"],
        ),
        "requests with very long lists; pages that tried to add to the dashboard": (
            attacks["send_long_lists"], attacks["add_to_the_dashboard"],
        ),
        "malformed requests; long texts for `/tokenize`": (attacks["send_garbage"], attacks["tokenize_long_texts"]),
        "`/health` without attackers, ms: median, 99th percentile, maximum": times(report["health_ms_calm"]),
        "`/health` under attack, ms: median, 99th percentile (allowed: 50), maximum": times(
            report["health_ms_attacked"]
        ),
        "requests running and KV blocks in use afterwards": tuple(map(int, reversed(report["in_use_afterwards"]))),
        "lines in the log; tracebacks": (report["log_lines"], report["tracebacks"]),
        "resident memory in the first two minutes of the attack, medians of tenths, MiB": join(
            report["memory_mib_warming_up"]
        ),
        "resident memory after that, medians of tenths, MiB": join(memory),
        "growth from the first of these tenths to the largest; allowed": (
            f"{100 * (max(memory) / memory[0] - 1):.1f}%; 3%"
        ),
    }  # fmt: skip
    return "\n".join(
        ["| count | value |", "|---|---|", *(f"| {name} | {join(value, '; ')} |" for name, value in rows.items())]
    )


def times(quantiles):
    """Median, 99th percentile and maximum as one cell."""
    return join(quantiles[name] for name in ("p50", "p99", "max"))


def join(values, separator=", "):
    """Numbers as one cell."""
    return values if isinstance(values, str) else separator.join(f"{value:,}" for value in values)


def with_table(page, report):
    """The page with the table of a run."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table(report)}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), json.loads(RESULT.read_text())), encoding="utf-8")
