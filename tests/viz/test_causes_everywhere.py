"""The causes of a run are the same in the live page, its files, links and saved pages, and in pages of parts."""

import base64
import gzip
import pickle
import random
import re
import zlib
from types import SimpleNamespace

import msgspec
import pytest

from workbench import simulate
from workbench.analysis.explain import explainer_of, slowest
from workbench.analysis.incident import incident
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.lines import Supplement
from workbench.viz.export_html import MAX_EXPLAINED, html_page
from workbench.viz.feed import Feed
from workbench.viz.layout.explanation import explanation_facts
from workbench.viz.link import link_to

LOADED = range(20, 26)
"""Steps beside which the page is loaded."""


class Uneven(CostModel):
    """Steps that take somewhat more or less than their contents explain, and much more while a page is loading."""

    number = 0

    def step_seconds(self, chunks):
        self.number += 1
        slow = 1.25 if self.number - 1 in LOADED else 1.0
        return super().step_seconds(chunks) * slow * (1 + 0.02 * (self.number * 7 % 5 - 2))


def recorded(count=10):
    """A run with prompts and decodes in the same steps, whose steps are slower while a page is loading."""
    rows = [
        {"id": f"r{i}", "prompt": {"len": 30 + 37 * i % 90}, "max_tokens": 12 + i % 5, "arrival_step": 4 * i}
        for i in range(count)
    ]
    costs = Uneven(fixed=0.01, per_prefill_token=2e-4, per_sequence=1e-3)
    return simulate({"config": {"max_num_batched_tokens": 48}, "requests": rows}, cost_model=costs)


def with_late_steps(trace, rng, pause_before=None):
    """The run with some steps that take 1.7 times as long, one that takes 30 times, and perhaps a pause before one."""
    slow = dict.fromkeys(rng.sample(range(5, len(trace)), 6), 1.7) | {rng.randrange(32, 40): 30.0}
    source = "vllm 0.33.0" if pause_before else trace.meta.source  # whose pauses are its own
    late, shift = Trace(msgspec.structs.replace(trace.meta, source=source)), 0.0
    arrivals = trace.arrivals()
    for index, record in enumerate(trace):
        shift += 5.0 if index == pause_before else 0.0
        while arrivals and arrivals[0][0] <= index:
            info = arrivals.pop(0)[1]
            late.add_request(msgspec.structs.replace(info, arrival_time=info.arrival_time + shift))
        longer = record.duration * (slow.get(index, 1.0) - 1.0)
        late.append(msgspec.structs.replace(record, time=record.time + shift, end=record.end + shift + longer))
        shift += longer
    late.end = trace.end
    return late


def live(trace):
    """The run as an engine has it that computes steps while a page is loading; the page is there before the last."""
    growing = Trace(trace.meta)
    engine = SimpleNamespace(trace=growing, state="running", name="e")
    feed, arrivals = None, trace.arrivals()
    for index, record in enumerate(trace):
        while arrivals and arrivals[0][0] <= index:
            growing.add_request(arrivals.pop(0)[1])
        if index == LOADED.start:
            feed = Feed(engine)
        if index == LOADED.stop - 1:
            feed.confirm()
        growing.append(record)
    growing.end = trace.end
    feed.next_packet()
    return growing


def from_link(link):
    packed = link.partition("run=")[2]
    return zlib.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), -zlib.MAX_WBITS)


def answers_of(page):
    (packed,) = re.findall(r'id="answers">([^<]+)<', page)
    return msgspec.json.decode(gzip.decompress(base64.b64decode(packed)))


def test_a_run_has_the_same_causes_and_fit_in_every_copy(tmp_path):
    trace = live(recorded())
    assert trace.disturbed == frozenset(LOADED)
    recording = tmp_path / "recorded.jsonl"
    trace.save(tmp_path / "run.jsonl.gz")
    recording.write_bytes(from_link(link_to(trace)))
    copies = [Trace.load(tmp_path / "run.jsonl.gz"), Trace.load(recording), pickle.loads(pickle.dumps(trace))]
    expected, fitted = [repr(each) for each in slowest(trace)], explainer_of(trace)._fitted
    assert fitted[1].notes[-1] == f"left out: {len(LOADED)} steps during which a page was loading"
    page = answers_of(html_page(trace))
    assert len(page["explanations"]) == len(trace.requests)
    for copy in copies:
        assert copy.disturbed == trace.disturbed
        assert explainer_of(copy)._fitted[0].to_dict() == fitted[0].to_dict()
        assert explainer_of(copy)._fitted[1] == fitted[1]
        assert [repr(each) for each in slowest(copy)] == expected
        assert answers_of(html_page(copy)) == page
    forgotten = Trace.load(tmp_path / "run.jsonl.gz")  # a control: the marks are what makes them equal
    forgotten._supplements.clear()
    assert explainer_of(forgotten)._fitted[1] != fitted[1]


def test_two_pages_mark_a_step_once_and_a_run_that_forgets_its_beginning_keeps_the_marks(tmp_path):
    trace = live(recorded())
    trace.mark_disturbed([LOADED.start, 30, len(trace) + 5, -1])
    assert trace.disturbed == {*LOADED, 30}
    assert trace[LOADED.start + 2 :].disturbed == {*LOADED[2:], 30}
    assert all(isinstance(said, Supplement) for said in trace.supplements) and len(trace.supplements) == len(LOADED) + 1
    growing = Trace(trace.meta)
    writer = growing.record_to(tmp_path / "run.jsonl")
    for _, info in trace.arrivals():
        growing.add_request(info)
    for record in trace:
        growing.append(record)
    growing.mark_disturbed(LOADED)
    writer.close("done")
    assert Trace.load(tmp_path / "run.jsonl").disturbed == frozenset(LOADED)
    assert growing.continued_from(trace[22:].keyframe).disturbed == frozenset(LOADED[2:])


@pytest.mark.parametrize("seed", range(6))
def test_a_part_has_the_causes_and_the_stalls_of_the_whole(seed):
    """Its own few steps would call others slow, divide steps by another fit, and explain nothing before them."""
    rng = random.Random(seed)
    trace = with_late_steps(recorded(16), rng)
    whole, first = explainer_of(trace), rng.randrange(15, 30)
    part = trace[first : first + rng.randrange(28, 45)]
    explainer = explainer_of(part)
    assert explainer._fitted == whole._fitted
    until = {record.step for record in trace[: part.offset + len(part)]}
    assert whole.slow and whole.stalls
    assert explainer.slow == {step: slow for step, slow in whole.slow.items() if step in until}
    assert explainer.stalls == {step: stall for step, stall in whole.stalls.items() if step in until}
    there = {record.step for record in part}
    assert incident(part).stalls == tuple([stall for step, stall in whole.stalls.items() if step in there])
    ended = [request_id for request_id, request in part.metrics().requests.items() if request.e2e is not None]
    inside = [request_id for request_id in ended if part.requests[request_id].arrival_step > first]
    assert inside and set(ended) - set(inside), "one that arrived before the part is explained from its arrival on"
    page = answers_of(html_page(part))["explanations"]
    there = {chunk.request_id for record in part for chunk in record.chunks}
    assert len(page) == MAX_EXPLAINED or there <= page.keys(), "those with an earlier first token, too"
    assert {each.request_id for each in slowest(part, MAX_EXPLAINED)} <= page.keys()
    for request_id in ended:
        in_part, in_whole = part.explain(request_id), trace.explain(request_id)
        assert in_part.parts == in_whole.parts
        if in_part.ttft is not None:
            assert in_part.ttft == in_whole.ttft
        if request_id in inside:
            assert in_part.gaps == in_whole.gaps
            assert page[request_id] == explanation_facts(in_whole, confirmed=False)


def test_the_time_before_a_part_is_no_stall_of_its_first_step():
    """A stall counts the pause before its step, and the time of the steps that the part leaves out is none."""
    trace = with_late_steps(recorded(16), random.Random(1), pause_before=20)
    assert trace.stalls()[0].step == 20 and trace.stalls()[0].before >= 5
    part = trace[20:]
    running = next(chunk.request_id for chunk in part[0].chunks if part.requests[chunk.request_id].arrival_step < 15)
    amounts = {found.kind: found.amount for found in part.explain(running).parts}
    assert amounts["stall"] == pytest.approx(5, rel=0.01)
