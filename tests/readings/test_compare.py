"""Comparison of two traces of the same requests: the first divergence, and the size of the changes."""

from __future__ import annotations

import json
import random
import re
import zlib
from html.parser import HTMLParser

import msgspec
import pytest
from trace_helpers import one_trace
from viz_traces import requests_in_time

from workbench import CostModel, simulate
from workbench.base.text import duration
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceError, TraceMeta
from workbench.trace.readings.compare import compare
from workbench.trace.readings.divergence import output_token_ids
from workbench.trace.readings.two_sides import Measure
from workbench.viz.layout.comparison import comparison_facts

COST = CostModel(fixed=0.01, per_prefill_token=0.0005)

WORKLOAD = {
    "config": {"max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 60},
    "requests": [
        {"id": "long", "prompt": {"len": 100}, "max_tokens": 4},
        {"id": "short", "prompt": {"len": 6}, "max_tokens": 4},
        {"id": "late", "prompt": {"len": 10}, "max_tokens": 3, "arrival_step": 3},
    ],
}


def with_tokens(trace: Trace, change) -> Trace:
    """The same trace with other sampled tokens: change(request_id, index, token) -> token."""
    result = Trace(trace.meta)
    for info in trace.requests.values():
        result.add_request(info)
    counts: dict[str, int] = {}
    for record in trace:
        chunks = []
        for chunk in record.chunks:
            if chunk.sampled is not None:
                index = counts[chunk.request_id] = counts.get(chunk.request_id, -1) + 1
                chunk = msgspec.structs.replace(chunk, sampled=change(chunk.request_id, index, chunk.sampled))
            chunks.append(chunk)
        result.append(msgspec.structs.replace(record, chunks=tuple(chunks)))
    result.end = trace.end
    return result


def test_a_trace_with_itself():
    trace = simulate(WORKLOAD)
    result = compare(trace, simulate(WORKLOAD))
    assert result.first_divergence is None
    assert result.same_tokens is True
    assert result.badge == "same tokens"
    assert result.notes == ()
    for request in result.requests:
        assert (request.ttft_delta, request.itl_delta, request.waste_delta) == (0, 0, 0)
        assert request.divergence is None


@pytest.mark.parametrize("timed", [False, True])
def test_runs_whose_requests_are_alike_have_a_sentence_in_place_of_a_table(timed):
    """Whether the schedules are equal or not: one row for each request would be as many rows of zeros."""
    requests = [{"id": f"r{n}", "prompt": {"len": 40}, "max_tokens": 6, "arrival_step": 2 * n} for n in range(30)]
    costs = {"cost_model": CostModel(fixed=0.01)} if timed else {}
    run, same, slower = (
        simulate({"config": {"num_blocks": num_blocks}, "requests": requests}, **costs) for num_blocks in (99, 98, 8)
    )
    latencies = [[(each.ttft, each.token_steps) for each in one.metrics().requests.values()] for one in (run, same)]
    assert latencies[0] == latencies[1]
    for other, alike in ((run, True), (same, True), (slower, False)):
        found = compare(run, other)
        for shown in (repr(found), found._repr_html_()):
            assert ("each of the 30 requests has the same latencies and recomputed tokens in both" in shown) == alike
            assert ("TTFT" in shown and "Δ" in shown and "r11" in shown) != alike
    assert "each of" not in repr(compare(run[:0], run[:0]))


def test_the_first_divergence_and_its_reason():
    a = simulate(WORKLOAD)
    b = simulate(WORKLOAD, config={"long_prefill_token_threshold": 16})
    result = compare(a, b)
    assert (result.first_divergence.step, result.first_divergence.request_id) == (0, "long")
    assert result.first_divergence.what == "A computes tokens [0, 64), B computes tokens [0, 16)"
    by_id = {request.request_id: request for request in result.requests}
    assert by_id["short"].divergence.step == 0
    assert by_id["short"].divergence.what == (
        "A lets it wait (token budget used up (64 of 64)), B computes tokens [0, 6)"
    )
    assert result.same_tokens
    assert by_id["short"].ttft_delta == -1  # in a it waits for the long one's first chunk
    assert by_id["long"].ttft_delta > 0
    assert compare(b, a).first_divergence.what == "A computes tokens [0, 16), B computes tokens [0, 64)"
    assert "config: long_prefill_token_threshold 0 -> 16" in result.notes


def test_fields_that_only_one_configuration_has_are_counted_and_few_are_named():
    def with_config(**config) -> Trace:
        return Trace(TraceMeta(source="elsewhere", config=config))

    of_an_engine = with_config(
        block_size=16, num_blocks=64, seed=0, attention_backend="cpu", watermark=0.0, policy="fcfs"
    )
    recorded = with_config(block_size=16, num_blocks=80, tensor_parallel_size=1)
    assert compare(recorded, of_an_engine).notes == (
        "config: num_blocks 80 -> 64",
        "config, in one trace only: tensor_parallel_size 1 in A",
    )
    policy = with_config(block_size=16, scheduling_policy="ShortestFirst()")
    assert compare(with_config(block_size=16), policy).notes == (
        "config, in one trace only: scheduling_policy 'ShortestFirst()' in B",
    )
    assert compare(recorded, recorded).notes == ()


def test_the_largest_change_comes_first():
    workload = {**WORKLOAD, "requests": WORKLOAD["requests"][::-1]}
    result = compare(simulate(workload), simulate(workload, config={"num_blocks": 30}))
    changes = [abs(request.ttft_delta) for request in result.requests]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] > 0
    for value in ("ttft", "itl", "waste"):
        ordered = [abs(getattr(request, f"{value}_delta") or 0) for request in result.sorted_by(value)]
        assert ordered == sorted(ordered, reverse=True)
    with pytest.raises(ValueError, match="ttft"):
        result.sorted_by("speed")


def test_rounding_is_no_change():
    a, b = requests_in_time(64), requests_in_time(128)
    found = compare(a, b)
    deltas = [request.ttft_b - request.ttft_a for request in found.requests]
    assert any(0 < abs(delta) < 1e-12 for delta in deltas), "some differ by rounding alone"
    gain, pay = sum(delta < -1e-9 for delta in deltas), sum(delta > 1e-9 for delta in deltas)
    assert f"{gain} requests gain, {pay} pay" in repr(found).split("mean TTFT")[1].split("\n")[0]
    assert "e-1" not in repr(found) and "e-1" not in found._repr_html_()
    small = {request.ttft_delta for request in found.requests if abs(request.ttft_delta) < 1e-9}
    assert small == {0.0}


@pytest.mark.parametrize("timed", (True, False))
def test_each_measure_has_both_sides_and_the_change_in_words(timed):
    """Mean, P99 and throughput, counted again from the records."""
    np = pytest.importorskip("numpy")
    runs = [requests_in_time(budget) for budget in (64, 128)] if timed else [simulate(WORKLOAD), simulate(WORKLOAD)]
    if not timed:
        runs[1] = simulate(WORKLOAD, config={"num_blocks": 30})
    found = compare(*runs)
    sides = []
    for run in runs:
        tokens = {who: [] for who in run.requests}
        for step in run:
            for chunk in step.chunks:
                if chunk.sampled is not None:
                    tokens[chunk.request_id].append(step.end if timed else step.step)
        begin = {who: info.arrival_time if timed else info.arrival_step - 1 for who, info in run.requests.items()}
        firsts = [times[0] - begin[who] for who, times in tokens.items()]
        gaps = [np.diff(times) for times in tokens.values() if len(times) > 1]
        length = run[-1].end - run[0].time if timed else len(run)
        means = [np.mean(firsts), np.percentile(firsts, 99), np.mean(np.concatenate(gaps))]
        sides.append([*means, np.percentile(np.concatenate(gaps), 99), sum(map(len, tokens.values())) / length])
    names = ["mean TTFT", "P99 TTFT", "mean ITL", "P99 ITL", f"output tokens per {'s' if timed else 'step'}"]
    assert [measure.name for measure in found.measures] == names
    for measure, a, b in zip(found.measures, *sides):
        assert (measure.a, measure.b) == (pytest.approx(a), pytest.approx(b))
        rises = b > a * (1 + 1e-9)
        latency = "TTFT" in measure.name or "ITL" in measure.name
        more, fewer = ("longer", "shorter") if latency else ("more", "fewer")
        if abs(b - a) <= 1e-9 * max(a, b):
            assert measure.words == "no change"
        elif b < 2 * a:
            assert measure.words in (f"{abs(b / a - 1):.0%} {more if rises else fewer}", "no change")
        assert f"{measure.name}: " in repr(found) and measure.words in repr(found)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_two_budgets_are_counted_and_no_latency_is_told_in_them(seed):
    """A step of 16 tokens is shorter than one of 96: twice as many of them need not take longer."""
    rng = random.Random(seed)
    requests = [
        {"id": f"r{n}", "prompt": {"len": rng.randint(20, 90)}, "max_tokens": rng.randint(3, 20), "arrival_step": n}
        for n in range(7)
    ]
    work = {"config": {"max_num_batched_tokens": 96, "num_blocks": 40}, "requests": requests}
    a, b = simulate(work), simulate(work, config={"max_num_batched_tokens": 16})
    found = compare(a, b)
    used = [a.num_blocks - 1 - min(record.free_blocks for record in run) for run in (a, b)]
    preempted = [sum(len(record.preempted) for record in run) for run in (a, b)]
    again = [sum(c.num_recomputed_tokens for record in run for c in record.chunks) for run in (a, b)]
    cached = [sum(c.num_cached_tokens for record in run for c in record.chunks) for run in (a, b)]
    assert {each.name: [each.a, each.b] for each in found.measures} == {
        "steps": [len(a), len(b)],
        "most KV blocks in use": used,
        "preemptions": preempted,
        "cached tokens": cached,
        "recomputed tokens": again,
    }
    assert found.notes[0].startswith(
        "steps of two token budgets, numbers of seats or chunk caps do not last equally long"
    )
    for said in (repr(found), found._repr_html_()):
        alike = "each of the 7 requests has the same recomputed tokens in both" in said
        assert ("recomputed A" in said) != alike and alike == all(each.waste_delta == 0 for each in found.requests)
        assert "TTFT" not in said and "ITL" not in said
    waste = [abs(each.waste_delta) for each in found.requests]
    assert waste == sorted(waste, reverse=True)
    facts = comparison_facts(a, b)
    assert all(row[1:5] == [None] * 4 for row in facts["rows"]) and facts["mean"][:4] == [None] * 4
    assert "first token" not in facts["verdict"] and f"steps {len(a)} -> {len(b)}" in facts["verdict"]
    for changes, counts_only in [
        ({"max_num_seqs": 2}, True),
        ({"long_prefill_token_threshold": 8}, True),
        ({"max_num_seqs": 900}, False),  # no step reaches it
        ({"num_blocks": 20}, False),
        ({"policy": "priority"}, False),
    ]:
        same = comparison_facts(a, simulate(work, config=changes))
        assert same["counts_only"] is counts_only and (same["measures"][0][0] == "mean TTFT") is not counts_only
        assert all((None in row[1:3]) is counts_only for row in same["rows"])
    other = {**work, "config": {"num_blocks": 40}}
    timed = comparison_facts(*(simulate(each, cost_model=COST) for each in (work, other)))
    assert timed["measures"][0][0] == "mean TTFT", "times are those of a clock"


@pytest.mark.parametrize("num_blocks", [60, 14, 10])
def test_without_latencies_the_table_has_the_requests_with_recomputed_tokens(num_blocks):
    requests = [{"id": f"r{n}", "prompt": {"len": 20 + 9 * n}, "max_tokens": 30} for n in range(7)]
    work = {"config": {"max_num_batched_tokens": 96, "num_blocks": num_blocks}, "requests": requests}
    a, b = simulate(work), simulate(work, config={"max_num_batched_tokens": 16})
    found = compare(a, b)
    again = {c.request_id for run in (a, b) for step in run for c in step.chunks if c.num_recomputed_tokens}
    assert found.counts_only and bool(again) == (num_blocks < 60) and len(again) < 7
    assert {row[0] for row in found.table[1]} == again
    for said in (repr(found), found._repr_html_()):
        assert ("recomputed A" in said) == bool(again)


@pytest.mark.parametrize(
    ("a", "b", "unit", "words"),
    [
        (2.0, 2.0 + 1e-12, "s", "no change"),
        (1.00001, 1.00002, "s", "no change"),
        (2.0, 2.01, "s", "less than 1% longer"),
        (2.0, 1.5, "s", "25% shorter"),
        (2.0, 7.0, "s", "3.5 times as long"),
        (10.0, 12.0, "", "20% more"),
        (10.0, 5.0, "", "50% fewer"),
        (10.0, 30.0, "", "3 times as many"),
        (0.0, 3.0, "steps", "0 before"),
    ],
)
def test_the_words_for_a_change(a, b, unit, words):
    assert Measure("x", a, b, unit).words == words


def test_waste_and_preemption():
    workload = {
        "config": {"block_size": 4, "num_blocks": 11, "enable_prefix_caching": False},
        "requests": [{"id": f"p{n}", "prompt": {"len": 12}, "max_tokens": 12} for n in range(3)],
    }
    a, b = simulate(workload), simulate(workload, config={"num_blocks": 60})
    assert sum(len(record.preempted) for record in a) > 0
    result = compare(a, b)
    assert sum(request.waste_delta for request in result.requests) == -a.metrics().summary.num_recomputed_tokens
    assert "preempts it" in result.first_divergence.what or "lets it wait" in result.first_divergence.what
    assert result.same_tokens


def test_the_first_token_that_differs():
    a = simulate(WORKLOAD)
    b = with_tokens(a, lambda request, index, token: token + 1 if (request, index) == ("short", 2) else token)
    result = compare(a, b)
    assert result.same_tokens is False
    difference = result.first_token_difference
    assert (difference.request_id, difference.index, difference.b - difference.a) == ("short", 2, 1)
    assert (
        result.badge == f"different tokens: short, output token 3: token {difference.a} in A, token {difference.b} in B"
    )
    assert result.first_divergence is None  # the schedule is the same
    assert [request.request_id for request in result.requests if request.token_difference] == ["short"]


def test_an_output_that_ends_earlier_differs():
    shorter = {**WORKLOAD, "requests": [{**request, "max_tokens": 2} for request in WORKLOAD["requests"]]}
    difference = compare(simulate(WORKLOAD), simulate(shorter)).first_token_difference
    assert (difference.index, difference.b) == (2, None)
    assert compare(simulate(shorter), simulate(WORKLOAD)).badge.endswith(f"nothing in A, token {difference.a} in B")


def test_an_unfinished_run_is_compared_up_to_its_last_step():
    whole = simulate(WORKLOAD)
    part = Trace(whole.meta)
    for info in whole.requests.values():
        part.add_request(info)
    for record in whole:
        result = compare(part, whole)
        assert result.first_divergence is None
        assert result.same_tokens in (True, None)
        part.append(record)


def test_tokens_that_were_not_recorded():
    trace = simulate(WORKLOAD)
    assert compare(with_tokens(trace, lambda *_: None), trace).same_tokens is None
    assert compare(with_tokens(trace, lambda *_: None), trace).badge == "no tokens to compare"
    recorded = with_tokens(trace, lambda *_: 0)  # a recorder that leaves token ids out
    recorded.meta = msgspec.structs.replace(trace.meta, config={**trace.config, "token_ids_recorded": False})
    assert compare(recorded, recorded).badge == "no tokens to compare"


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda requests: requests[:2], "only A has 'late'"),
        (lambda requests: [*requests, {"id": "x", "prompt": [1]}], "only B has 'x'"),
        (lambda requests: [{**requests[0], "prompt": {"len": 99}}, *requests[1:]], "100 tokens in A, 99 in B"),
        (lambda requests: [{**requests[0], "prompt": {"len": 100, "seed": 2}}, *requests[1:]], "differ: token 1 is"),
        (lambda requests: [], "only A has 'long', 'short', 'late'"),
    ],
)
def test_other_workloads_are_refused(change, reason):
    other = {**WORKLOAD, "requests": change(WORKLOAD["requests"])}
    with pytest.raises(TraceError, match=reason):
        compare(simulate(WORKLOAD), simulate(other))


def test_other_arrivals_are_noted():
    moved = {**WORKLOAD, "requests": [{**request, "arrival_step": 1} for request in WORKLOAD["requests"]]}
    notes = compare(simulate(WORKLOAD), simulate(moved)).notes
    assert notes == ("3 requests arrive in different steps, the first is long: 0 in A, 1 in B",)
    first, *others = WORKLOAD["requests"]
    found = compare(
        simulate(WORKLOAD), simulate({**WORKLOAD, "requests": [first, *others[:-1], {**others[-1], "arrival_step": 9}]})
    )
    assert found.notes[0].startswith("request late arrives in different steps: ") and "1 requests" not in str(found)
    two = {"requests": WORKLOAD["requests"][:2]}
    config = {**WORKLOAD["config"], "max_num_batched_tokens": 200}
    slower = compare(*(simulate(two, config=config | {"num_blocks": blocks}) for blocks in (60, 27)))
    assert "; 0 requests gain, 1 pays" in str(slower)


def test_cut_traces_are_noted(tmp_path):
    trace = simulate(WORKLOAD)
    trace.save(tmp_path / "t.jsonl")
    data = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "t.jsonl").write_bytes(data[:-40])
    result = compare(Trace.load(tmp_path / "t.jsonl"), trace)
    assert result.first_divergence is None
    assert "A is not whole" in result.notes[0]


def test_seconds_if_both_have_a_clock():
    trace = one_trace()
    result = compare(trace, trace)
    assert result.unit == "s"
    assert result.requests[0].ttft_a == trace.metrics().requests[result.requests[0].request_id].ttft.seconds


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert all(name == "class" for name, _ in attrs)

    def handle_data(self, data):
        self.text += data


def test_hostile_names_are_only_text():
    name = "<script>alert(1)</script>&amp;\"'"

    def run(num_tokens):
        trace = Trace(TraceMeta(source="<b>bold</b>", config={"block_size": 4, "num_blocks": 9, "<i>": num_tokens}))
        trace.add_request(RequestInfo(name, 8))
        chunk = Chunk(name, 0, num_tokens, True, "intermediate", None, "token_budget", (1, 2))
        trace.append(StepRecord(0, admitted=(name,), chunks=(chunk,)))
        trace.end = "stuck"
        return trace

    result = compare(run(4), run(5))
    parser = Tags()
    parser.feed(result._repr_html_())
    assert parser.tags <= {"div", "style", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert name in parser.text
    assert name in repr(result)


def test_accepted_drafts_are_tokens_of_the_output():
    plain = simulate(WORKLOAD)
    drafts = {"num_speculative_tokens": 3}
    accepting = [{**request, "accepts": [2, 1]} for request in WORKLOAD["requests"]]
    speculative = simulate({**WORKLOAD, "requests": accepting}, config=drafts)
    assert len(speculative) < len(plain)
    assert compare(plain, speculative).badge == "same tokens"
    cells = [int(cell) for cell in re.findall(r"<td>(\d+)</td>", speculative._repr_html_())]
    assert cells[1::2] == [request["max_tokens"] for request in WORKLOAD["requests"]]


def test_a_simulation_that_takes_its_tokens_says_so():
    recorded = Trace.load("docs/data/run.jsonl.gz")
    forked, other = recorded.fork(max_num_seqs=2), recorded.fork(max_num_seqs=3)
    assert compare(recorded, forked).badge == "same tokens: B is a simulation, which takes them from A"
    assert compare(forked, recorded).badge == "same tokens: A is a simulation, which takes them from B"
    assert "both are simulations" in repr(compare(forked, other))
    assert compare(recorded, recorded).badge == "same tokens"


def test_an_output_that_is_cut_has_the_same_tokens_as_far_as_both_have_them():
    sides = [Trace.load(f"tests/data/vllm-recorded/{side}/h_abort.jsonl.gz") for side in ("sync", "async")]
    numbers = [{name: len(tokens) for name, tokens in output_token_ids(side).items()} for side in sides]
    assert (numbers[0]["a1"], numbers[1]["a1"]) == (2, 1)
    assert compare(*sides).badge == "same tokens as far as both have them"
    assert compare(sides[0], sides[0]).badge == "same tokens"


def test_a_prediction_beside_a_measured_run_says_so():
    recorded = Trace.load("notebooks/data/vllm_served.jsonl.gz")
    now, changed = recorded.whatif(), recorded.whatif(max_num_seqs=16)
    note = "the times of {} are predicted, those of {} are measured"

    def told_of(*pair):
        return " ".join(repr(compare(*pair)).split())

    for pair, names in (((recorded, changed), "BA"), ((now, recorded), "AB")):
        assert note.format(*names) in told_of(*pair) and "beyond the spread" not in told_of(*pair)
    for pair in ((now, changed), (recorded, recorded)):
        assert "are predicted" not in told_of(*pair)
    assert "mean TTFT: 1.78 s -> 873 ms, -37% per request, in 6 of 8 parts of the run; " in told_of(recorded, changed)


def test_a_narrow_terminal_has_no_line_that_is_cut(monkeypatch):
    runs = [Trace.load(f"docs/data/{name}.jsonl.gz") for name in ("run", "run")]
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, repr(compare(*runs)).splitlines())) <= 60


def test_repr_of_many_requests():
    workload = {**WORKLOAD, "requests": [{"id": f"r{n}", "prompt": {"len": 3}, "max_tokens": 1} for n in range(60)]}
    result = compare(*(simulate(workload, cost_model=CostModel(fixed=seconds)) for seconds in (0.01, 0.02)))
    assert "... and 40 requests with smaller changes" in repr(result)
    assert "... and 40 requests" in result._repr_html_()


def renamed(trace, name):
    """The trace with other request ids."""
    text = json.dumps(trace.to_dict())
    for request_id in sorted(trace.requests, key=len, reverse=True):
        text = text.replace(f'"{request_id}"', f'"{name(request_id)}"')
    content = json.loads(text)
    copy = Trace(trace.meta)
    records = [msgspec.convert(step, StepRecord) for step in content["steps"]]
    requests = [msgspec.convert(info, RequestInfo) for info in content["requests"]]
    for info in requests:
        copy.add_request(info)
    for record in records:
        copy.append(record)
    copy.end = trace.end
    return copy


def two_runs():
    requests = [
        {"id": f"q{i}", "prompt": {"len": 30 + 7 * (i % 3)}, "max_tokens": 4, "arrival_step": i} for i in range(6)
    ]
    work = {"config": {"max_num_batched_tokens": 64}, "requests": requests}
    return simulate(work), simulate(work, config={"num_blocks": 6})


def test_runs_of_vllm_are_matched_without_the_random_end_of_their_ids():
    first, second = two_runs()
    a = renamed(first, lambda rid: f"cmpl-{rid}-0-{zlib.crc32(rid.encode()):08x}")
    b = renamed(second, lambda rid: f"cmpl-{rid}-0-{zlib.crc32(rid.encode()) ^ 0xABCDEF:08x}")
    expected, found = compare(first, second), compare(a, b)
    assert sorted(r.ttft_delta for r in found.requests) == sorted(r.ttft_delta for r in expected.requests)
    for request in found.requests:
        assert request.b.request_id.split("-")[1] == request.a.request_id.split("-")[1]
    assert "6 requests matched by id without its random end" in str(found) and "requests gain" in str(found)
    assert str(found.first_divergence).split(":")[1] == str(expected.first_divergence).split(":")[1]


def test_runs_without_ids_of_the_client_are_matched_by_arrival_and_length():
    first, second = two_runs()
    found = compare(first, renamed(second, lambda rid: f"other-{rid}"))
    assert "6 requests matched by arrival and length" in found.notes
    for request in found.requests:
        assert request.b.request_id == f"other-{request.a.request_id}"


def test_other_workloads_are_still_refused():
    first, _ = two_runs()
    other = simulate({"requests": [{"id": f"z{i}", "prompt": {"len": 5 + i}, "max_tokens": 9} for i in range(6)]})
    with pytest.raises(TraceError, match="different requests"):
        compare(first, other)


def test_the_cells_of_the_table_have_units():
    one, other = (
        simulate({**WORKLOAD, "config": {**WORKLOAD["config"], "num_blocks": n}}, cost_model=COST) for n in (60, 30)
    )
    title, *rows = compare(one, other).table
    assert title[1:7] == ["TTFT A", "TTFT B", "TTFT Δ", "ITL A", "ITL B", "ITL Δ"]
    request = compare(one, other).requests[0]
    assert rows[0][0][1:3] == [duration(request.ttft_a), duration(request.ttft_b)]
    assert rows[0][0][3] == ("0" if request.ttft_delta == 0 else f"+{duration(request.ttft_delta)}")
    assert compare(simulate(WORKLOAD), simulate(WORKLOAD)).table[0][1] == "TTFT steps A"


@pytest.mark.parametrize("seed", range(6))
def test_two_parts_of_one_run_have_the_same_tokens_where_both_have_them(seed):
    rng = random.Random(seed)
    requests = [{"id": f"r{n}", "prompt": {"len": rng.randint(5, 60)}, "max_tokens": 40} for n in range(5)]
    run = simulate({"config": {"max_num_seqs": 3, "max_num_batched_tokens": 32}, "requests": requests})
    starts = sorted(rng.sample(range(2, 40), 2))
    first, second = run[starts[0] :], run[starts[1] :]
    assert first[0].step < second[0].step
    comparison = compare(first, second)
    assert comparison.same_tokens is True and comparison.first_token_difference is None
    outputs = output_token_ids(run)
    name = rng.choice([each for each in outputs if run.requests[each].arrival_step == 0 and len(outputs[each]) == 40])
    at = rng.randrange(len(outputs[name]) - 3, len(outputs[name]))
    changed = with_tokens(run, lambda who, index, token: token + 1 if (who, index) == (name, at) else token)
    found = compare(changed[starts[0] :], second).first_token_difference
    has_it = any(chunk.request_id == name and chunk.accepted for record in second for chunk in record.chunks)
    assert (found is not None) == has_it
    if found is not None:
        assert (found.request_id, found.index, found.a, found.b) == (name, at, outputs[name][at] + 1, outputs[name][at])
