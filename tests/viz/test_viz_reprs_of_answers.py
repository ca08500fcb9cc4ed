"""Answers and parts of an engine as a notebook cell shows them: tables and one line, not walls of fields."""

import re

from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig, SamplingParams, misses_table, simulate
from workbench.engine.shortcuts import Answer
from workbench.trace.readings.metrics import LATENCIES
from workbench.viz.reprs import table
from workbench.viz.style import STYLE

REQUESTS = [{"id": name, "prompt": {"len": 60, "seed": 1}, "max_tokens": 4} for name in "abc"]
TRACE = simulate({"requests": REQUESTS, "config": {"num_blocks": 10, "max_num_seqs": 2}})


def cells(html):
    return [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)]


def test_misses_are_a_table():
    misses = misses_table(TRACE)
    html, text = misses._repr_html_(), repr(misses)
    assert text == str(misses) and misses.heading in text and misses.heading in html
    assert len(misses.lost) > 0 < len(misses.changes)
    for reason, tokens in misses.lost.items():
        assert f"{tokens:,}" in cells(html) and reason in cells(html)
    for change in misses.changes:
        row = [f"{change.saved:,}", f"{change.lost:,}", change.change]
        found = cells(html)
        assert row in [found[place : place + 3] for place in range(len(found))]
    nothing = misses_table(simulate({"requests": REQUESTS, "config": {"enable_prefix_caching": False}}))
    assert repr(nothing) == nothing.heading and nothing.heading in nothing._repr_html_()


def test_a_summary_is_the_table_of_the_metrics():
    metrics = TRACE.metrics()
    assert repr(metrics.summary) == repr(metrics) and metrics.summary._repr_html_() == metrics._repr_html_()
    assert all(title.strip() in repr(metrics.summary) for title, _ in LATENCIES)


def test_a_part_of_a_trace_counts_the_requests_that_it_is_about():
    steps = {
        name: [step.step for step in TRACE if name in (chunk.request_id for chunk in step.chunks)] for name in "abc"
    }
    last = max(steps["c"])
    part = TRACE[last : last + 1]
    assert part.present == {"c"} and len(part.requests) == 3
    assert "1 request," in repr(part) and "3 requests," in repr(TRACE) and TRACE.present == {"a", "b", "c"}


def test_the_parts_of_an_engine_tell_their_state_in_a_line():
    with Engine(make_tiny_llama(), EngineConfig(num_blocks=64)) as engine:
        assert repr(engine.breakpoints) == "Breakpoints(none)"
        engine.add_request("w5 w6 w7", SamplingParams(max_tokens=4, ignore_eos=True), request_id="r0")
        engine.break_when("finish")
        engine.run(progress=False)
        assert repr(engine.breakpoints) == "Breakpoints(1: a request ends, 1 hit)"
        free = engine.scheduler.num_free_blocks
        assert repr(engine.scheduler) == f"Scheduler(step 4: 0 running, 0 waiting, {free} of 63 KV blocks free)"
        runner = repr(engine.runner)
        assert "64 KV blocks" in runner and engine.runner.backend_name in runner and "\n" not in runner
        assert engine.outputs._ipython_key_completions_() == ["r0"]


def test_an_answer_has_the_table_of_its_causes_and_counts_its_request_alone():
    with Engine(make_tiny_llama(), EngineConfig(num_blocks=64)) as engine:
        for n in range(5):
            engine.add_request("w5 w6", SamplingParams(max_tokens=2), request_id=f"before{n}")
        engine.run(progress=False)
        before = len(engine.trace)
        (output,) = engine.generate("w5 w6 w7", max_tokens=3)
        answer = Answer(output.text, output.request_id, engine.trace, engine.trace[before:])  # as `ask` makes it
        explained = engine.trace.explain(answer.request_id)
        assert explained._repr_html_() in answer._repr_html_() and "<pre>" not in answer._repr_html_()
        assert "1 request," in answer._repr_html_() and "6 requests" not in answer._repr_html_()


def test_only_a_cell_with_a_long_word_may_be_broken_inside_it():
    """A row of underscores stays in its cell, and no number is cut in two."""
    html = table(("prompt", "time"), [("_" * 120, "1,240 ms"), ("many short words " * 9, "12,345.6")])
    assert re.findall(r"<td class=long>(.*?)</td>", html) == ["_" * 120]
    assert re.search(r"td\.long\{[^}]*overflow-wrap:anywhere", STYLE) and STYLE.count("overflow-wrap:anywhere") == 1
