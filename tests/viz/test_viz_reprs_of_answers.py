"""Answers and parts of an engine as a notebook cell shows them: tables and one line, not walls of fields."""

import re
import sys
from html import unescape
from itertools import pairwise

import msgspec
import pytest
from word_llama import make_tiny_llama

from workbench import CostModel, Engine, EngineConfig, SamplingParams, Trace, misses_table, simulate
from workbench.engine.shortcuts import Answer
from workbench.trace.readings.metrics import LATENCIES, amount
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


def first_and_gaps(trace, name):
    """By its records: the first token of a request since its arrival, and the mean time between its tokens."""
    times = [record.end for record in trace for chunk in record.chunks if chunk.request_id == name and chunk.accepted]
    gaps = [after - before for before, after in pairwise(times)]
    return times[0] - trace.requests[name].arrival_time, sum(gaps) / len(gaps) if gaps else None


@pytest.mark.parametrize("count", [1, 20, 61])
def test_requests_of_a_run_are_a_table_and_a_data_frame(count, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    ask = [
        {"id": f"<r{i}>", "prompt": {"len": 5 + i}, "max_tokens": 1 + i % 9, "arrival_time": 0.1 * i}
        for i in range(count)
    ]
    config = {"num_blocks": 6, "block_size": 16, "max_model_len": 80}
    trace = simulate({"config": config, "requests": ask}, cost_model=CostModel(fixed=0.1))
    requests = trace.metrics().requests
    head, *lines = repr(requests).split("\n")
    assert (lines.pop() == "... and 41 more") if count > 20 else True
    assert len(lines) == min(count, 20) and head.split()[0] == "request"
    found = cells(requests._repr_html_())
    assert len(found) == 7 * (1 + len(lines)) and ("<p>... and 41 more</p>" in requests._repr_html_()) == (count > 20)
    for place, (line, asked) in enumerate(zip(lines, ask)):
        ttft, gap = first_and_gaps(trace, asked["id"])
        preempted = sum(asked["id"] in record.preempted for record in trace)
        row = [asked["id"], amount(ttft, "s"), amount(gap, "s"), f"{preempted}"]
        row += [f"{asked['prompt']['len']}", f"{asked['max_tokens']}", "hit max_tokens"]
        assert re.split(r"  +", line) == row
        assert [unescape(cell).replace("\xa0", " ") for cell in found[7 * (place + 1) : 7 * (place + 2)]] == row
    frame = requests.to_pandas()
    assert frame.num_preemptions.sum() > 0 or count < 61
    assert list(frame.request_id) == [each["id"] for each in ask]
    assert frame.num_output_tokens.tolist() == [each["max_tokens"] for each in ask]
    expected = [first_and_gaps(trace, each["id"]) for each in ask]
    assert frame.ttft_seconds.tolist() == pytest.approx([ttft for ttft, _ in expected])
    assert frame.itl_mean_seconds.dropna().tolist() == pytest.approx([gap for _, gap in expected if gap is not None])
    assert frame.num_preemptions.tolist() == [sum(each["id"] in record.preempted for record in trace) for each in ask]


def test_requests_that_wait_or_ended_early_say_so():
    trace = simulate({"config": {"max_num_seqs": 1}, "requests": [{"id": name, "prompt": [1, 2]} for name in "ab"]})
    first, second = repr(trace[:3].metrics().requests).split("\n")[1:]
    assert first.split() == ["a", "1", "step", "1", "step", "0", "2", "3", "not", "ended"]
    assert second.split() == ["b", ">=3", "steps", "-", "0", "2", "0", "not", "ended"]
    assert repr(Trace(trace.meta).metrics().requests) == "no request"
    assert len(Trace(trace.meta).metrics().requests.to_pandas()) == 0


def test_requests_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the extra notebook \(pandas is not installed\): pip install"):
        TRACE.metrics().requests.to_pandas()


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
    assert list(part.requests) == ["c"]
    assert "1 request," in repr(part) and "3 requests," in repr(TRACE)


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


SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n<|im_start|>user\n"
COUNT = "one two three four five six seven "


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        ([f"{SYSTEM}Why is the sky blue?", f"{SYSTEM}Why not?"], ["… Why is the sky blue?", "… Why not?"]),
        ([f"{SYSTEM}Name one.", f"{SYSTEM}What is 2 + 2?", ""], ["… Name one.", "… What is 2 + 2?", ""]),
        (
            ["The capital of France is", "The capital of France is a"],
            ["The capital of France is", "The capital of France is a"],
        ),
        ([COUNT * times for times in (1, 2)], [COUNT, COUNT * 2]),
        ([COUNT * times for times in (4, 10)], ["… five six seven ", f"… five six seven {COUNT * 2}"[:79] + "…"]),
        ([f"{COUNT * 3}and {word}" for word in ("eight", "ten")], ["… six seven and eight", "… six seven and ten"]),
        (["Once upon a time", "Once upon a hill"], ["Once upon a time", "Once upon a hill"]),
        ([f"{SYSTEM}Hello", f"{SYSTEM}Hello"], [f"{SYSTEM}Hello"[:79].replace("\n", " ") + "…"] * 2),
    ],
)
def test_a_table_of_requests_shows_the_words_in_which_prompts_differ(prompts, shown):
    run = simulate({"requests": [{"id": f"r{n}", "prompt": {"len": 9}, "max_tokens": 2} for n in range(len(prompts))]})
    trace = Trace(run.meta)
    for prompt, info in zip(prompts, run.requests.values()):
        trace.add_request(msgspec.structs.replace(info, prompt=prompt))
    for record in run:
        trace.append(record)
    of_trace = cells(trace._repr_html_().replace("\n", " "))
    found = [unescape(of_trace[of_trace.index(f"r{n}") + 3]) for n in range(len(prompts))]
    assert found == shown
