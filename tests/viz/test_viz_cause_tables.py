"""The tables of a notebook that say why requests took as long as they did."""

import re
from dataclasses import replace
from html import unescape

import pytest

from workbench import Trace
from workbench.analysis.causes import tabulate
from workbench.analysis.explain import explain, slowest


@pytest.fixture(scope="module")
def trace():
    return Trace.load("notebooks/data/vllm_served.jsonl.gz")


def cells_of(html):
    """The rows of a table, each a list of texts."""
    rows = re.findall("<tr>(.*?)</tr>", html, re.S)
    return [[unescape(cell).replace("\xa0", " ") for cell in re.findall("<t[hd]>(.*?)</t[hd]>", row)] for row in rows]


def test_each_row_and_note_of_an_explanation_is_in_its_table(trace):
    explanation = slowest(trace, 1)[0]
    html = explanation._repr_html_()
    rows = cells_of(html)[1:]
    said = [line.strip() for line in repr(explanation).splitlines()[1:]]
    for name, time, share, cause, who, where in rows:
        if name and not name.startswith("from arrival"):
            assert said.pop(0) == name
        assert re.sub(" +", " ", said.pop(0)) == f"{time} {share} {cause}{f': {who}' if who else ''}" + (
            f" ({where})" if where else ""
        )
    assert len(rows) > 15 and said == [unescape(note) for note in re.findall("<p>(.*?)</p>", html)]
    assert explanation.request_id in html and cells_of(html)[1][0].startswith(
        f"from arrival at {explanation.arrived} to"
    )


def test_the_causes_of_all_requests(trace):
    table = tabulate(slowest(trace), "ttft")
    html = table._repr_html_()
    lines = repr(table).splitlines()
    assert unescape(re.search("<h4>(.*?)</h4>", html)[1]) == lines[0]
    assert [re.sub(" +", " ", line).strip() for line in lines[1:]] == [" ".join(row) for row in cells_of(html)]


def test_names_of_requests_are_escaped(trace):
    explanation = replace(explain(trace, next(iter(trace.requests))), request_id="<script>\x1b[2J\u202e")
    html = explanation._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;\\x1b[2J\\u202e" in html


def test_each_latency_of_the_metrics_has_its_unit(trace):
    """The table has the numbers of the text, each with a unit that fits it."""
    summary, html = trace.metrics().summary, trace.metrics()._repr_html_()
    rows = cells_of(html)
    assert rows[0] == ["latency", "mean", "p50", "p95", "p99", "max", "count"] and len(rows) == 6
    for (title, *cells, count), name in zip(rows[1:], ("ttft", "queue", "prefill", "itl", "e2e"), strict=True):
        found = getattr(summary, name)
        for cell, statistic in zip(cells, ("mean", "p50", "p95", "p99", "max"), strict=True):
            value, unit = re.fullmatch(r"(?:>=)?([\d.e+-]+) (s|ms)", cell).groups()
            assert float(value) * {"s": 1, "ms": 1e-3}[unit] == pytest.approx(getattr(found, statistic), rel=5e-3), (
                title
            )
        assert count == f"{found.count:,}"
    said = repr(trace.metrics()).splitlines()
    assert unescape(re.search("<h4>(.*?)</h4>", html)[1]) == said[0]
    assert [unescape(line) for line in re.findall("<p>(.*?)</p>", html)] == said[1:4]
