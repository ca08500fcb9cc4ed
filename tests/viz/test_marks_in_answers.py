"""Sentences, the page of a fleet, comparisons and causes: every number is a fact of the records."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from axis_times import seconds_of
from facts_of_records import ENDS, Facts
from msgspec.structs import replace
from painted import close, seconds
from runs_to_draw import COSTS, RUNS, run
from test_marks_in_pictures import Tables, shorten
from test_marks_of_runs import PAIRS, compared, first_difference, pair, percentile
from test_marks_of_steps import near, tokens

from workbench import simulate, simulate_fleet
from workbench.analysis.causes import IDLE
from workbench.base.text import duration
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace, TraceMeta
from workbench.trace.readings.fleet import Fleet
from workbench.trace.readings.metrics import amount
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.narrate import end_words, narrate, shown
from workbench.trace.records import Chunk, StepRecord
from workbench.viz.layout.comparison import comparison_facts
from workbench.viz.layout.explanation import explanation_facts
from workbench.viz.layout.incident import incident_facts

# -- sentences ---------------------------------------------------------------------------------------------------------


def several(names):
    names = [shorten(name, 24) for name in names]
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2:,} more"]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def plural(count, noun, many=None):
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def work(record):
    prompts = [chunk for chunk in record.chunks if chunk.arm != "decode"]
    replies = [chunk for chunk in record.chunks if chunk.arm == "decode"]
    total = sum(chunk.num_tokens for chunk in prompts)
    again = sum(chunk.num_recomputed_tokens for chunk in prompts)
    token = "token" if again or {chunk.request_id for chunk in prompts} & {*record.resumed} else "prompt token"
    if not prompts and not replies:
        return "nothing is computed"
    if not prompts:
        if any(chunk.accepted for chunk in replies):
            replies = [chunk for chunk in replies if chunk.accepted]
        grown = sum(max(1, len(chunk.accepted)) for chunk in replies)
        by = f"by {grown:,} tokens" if grown != len(replies) else "by one token"
        if len(replies) == 1:
            return f"the reply to {replies[0].request_id} grows {by}"
        return f"{len(replies):,} replies grow {by}" + (" each" if by == "by one token" else "")
    if replies:
        words = f"{plural(total, token)} and {plural(len(replies), 'reply', 'replies')} share one pass"
    elif len(prompts) > 1:
        words = f"{plural(total, token)} of {several([chunk.request_id for chunk in prompts])} share one pass"
    else:
        (chunk,) = prompts
        noun = token if total == 1 else f"{token}s"
        if chunk.num_cached_tokens:
            cached = f"the prefix cache has {plural(chunk.num_cached_tokens, 'token')}"
            part = f"{total:,} {noun} of {chunk.request_id} ({cached})"
        else:
            number = "" if total == 1 else f"{total:,} "
            parts = {
                (True, True): f"the first {number}{noun}",
                (True, False): f"all {number}{noun}" if number else f"the only {noun}",
                (False, True): f"{total:,} more {noun}",
                (False, False): f"the last {number}{noun}",
            }
            part = f"{parts[chunk.start == 0, chunk.is_partial_prefill]} of {chunk.request_id}"
        words = f"{part} {'takes' if total == 1 else 'take'} one pass"
    return words + (f", {again:,} of them again" if again else "")


def because(reason):
    if reason is not None and reason.kind == "token_budget" and reason.needed is None:
        return "the token budget is used up"
    if reason is not None and reason.kind == "seats":
        return f"{'the only seat is' if reason.value < 2 else f'all {reason.value:,} seats are'} taken ({reason.limit})"
    return shown(reason)


def sentence(record, end_of=None):
    parts = [work(record)]
    if record.resumed:
        parts.append(f"{several(record.resumed)} {'is' if len(record.resumed) == 1 else 'are'} resumed")
    found = {chunk.request_id: chunk.num_cached_tokens for chunk in record.chunks if chunk.num_cached_tokens}
    if found and len(record.chunks) > 1:
        parts.append(f"the prefix cache has {plural(sum(found.values()), 'token')} of {several([*found])}")
    if record.preempted:
        verb = "loses" if len(record.preempted) == 1 else "lose"
        parts.append(
            f"{several(record.preempted)} {verb} {'its' if verb == 'loses' else 'their'} KV blocks and must start again"
        )
    groups = {}
    for name in record.finished:
        reason = record.finish_reasons.get(name, "")
        groups.setdefault(end_of(name, record) if end_of else ENDS.get(reason, reason), []).append(name)
    for end, names in groups.items():
        end = f" ({end})" if end else ""
        parts.append(f"{several(names)} {'is' if len(names) == 1 else 'are'} done{end}")
    if record.aborted:
        parts.append(f"{several(record.aborted)} {'was' if len(record.aborted) == 1 else 'were'} aborted")
    waits = {}
    for name in record.waiting:
        if name not in record.preempted:
            waits.setdefault(record.passed_over.get(name, record.waiting_reason), []).append(name)
    for reason, names in list(waits.items())[:2]:
        why = because(reason)
        parts.append(f"{several(names)} {'waits' if len(names) == 1 else 'wait'}{f': {why}' if why else ''}")
    return f"Step {record.step:,}: {'; '.join(parts)}."


@pytest.mark.parametrize("name", [*RUNS, "many 0", "timed 2", "plain 5", "cut 0", "cut 2"])
def test_sentences(name):
    trace, facts = run(name)
    for record in facts.records:
        assert narrate(record, trace.requests) == sentence(record, facts.end_of)
        assert narrate(record) == sentence(record)


@pytest.mark.parametrize("name", ["cut 0", "cut 2", "spec 16", "async 24"])
def test_the_ends_of_requests(name):
    """In the table of the requests of a run, and of a part that lacks their first tokens."""
    trace, facts = run(name)
    ends = {who: facts.end_of(who, record) for record in facts.records for who in record.finished}
    for begin in (0, len(trace) // 2):
        requests = metrics(trace[begin:]).requests
        here = {who: end for who, end in ends.items() if who in requests and requests[who].finish_reason}
        assert here and {who: requests[who].end for who in here} == here


def chunk(name, start, count, arm, sampled=7, **more):
    return Chunk(name, start, count, arm == "intermediate", arm, sampled, "complete", **more)


@pytest.mark.parametrize(
    "record",
    [
        StepRecord(7, chunks=(chunk("a", 9, 3, "decode", drafts=(1, 2), sampled_before=(1,), num_accepted=1),)),
        StepRecord(1700, chunks=tuple(chunk(f"r{i}", 4, 1, "decode") for i in range(2000))),
        StepRecord(7, chunks=(chunk("a", 9, 1, "decode", sampled=None), chunk("b", 9, 1, "decode", sampled=None))),
        StepRecord(7, chunks=(chunk("a", 0, 1, "new_final", num_cached_tokens=1),)),
        *(
            StepRecord(7, chunks=(chunk("a", start, count, arm),))
            for start in (0, 9)
            for count in (1, 2)
            for arm in ("new_final", "intermediate")
        ),
        StepRecord(7, chunks=(chunk("a", 3, 9, "intermediate", None, num_recomputed_tokens=4),), preempted=("b", "c")),
        StepRecord(7, finished=("a", "b", "c"), finish_reasons={"a": "stop", "b": "length", "c": "stop"}),
        StepRecord(7, aborted=("a", "b"), waiting=("c",), preempted=("c",)),
        StepRecord(7, chunks=(chunk("r" * 40, 0, 5, "new_final"), chunk("b", 0, 5, "new_final")), waiting=("x" * 40,)),
    ],
)
def test_sentences_of_rare_steps(record):
    found, expected = narrate(record), sentence(record)
    if "r" * 30 not in expected:
        assert found == expected


def test_ends_and_names_of_every_length():
    expected = {None: "running", "": "running", "other": "other", **ENDS}
    assert {reason: end_words(reason) for reason in expected} == expected
    assert end_words("error", "out of memory") == "failed: out of memory"
    for size in (23, 24, 25):
        name = "n" * size
        record = StepRecord(7, chunks=(chunk(name, 9, 1, "decode"),))
        shown_ = name if size <= 24 else f"{name[:23]}…"
        assert narrate(record) == f"Step 7: the reply to {shown_} grows by one token."


# -- the page of a fleet -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet_run():
    shared = {"len": 40, "seed": "shared"}
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"parts": [shared, {"len": 5 + 9 * n}]},
            "max_tokens": 4 + n % 7,
            "arrival_time": n / 70,
        }
        for n in range(24)
    ]
    config = {"max_num_seqs": 3, "num_blocks": 60, "block_size": 8, "max_num_batched_tokens": 64}
    return simulate_fleet({"requests": requests, "cost_model": COSTS, "config": config}, replicas=3)


def test_the_rows_of_a_fleet(fleet_run, tmp_path):
    from workbench.viz.fleet_rows import CACHED, KV, RUNNING, WAITING, WAY, fleet_svg

    fleet_run.save(tmp_path)
    with Fleet(tmp_path) as fleet:
        traces = dict(fleet.traces)
        facts = {name: Facts(trace) for name, trace in traces.items()}
        begin = min(trace.meta.created for trace in traces.values())
        end = max(trace.meta.created - begin + trace[-1].end for trace in traces.values())
        asked = facts["replica-1"].order[1]
        root = ET.fromstring(fleet_svg(traces, asked))
        paths = [(path.get("d"), path.get("fill"), path.get("stroke")) for path in list(root.iter()) if path.get("d")]
        texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter() if t.tag.endswith("text")]
        is_time = re.compile(r"[\d.:,]+ (µs|ms|s|min|h)").fullmatch
        ticks = [(x, seconds_of(words)) for x, y, words in texts if is_time(words)]
        (x0, t0), (x1, t1) = ticks[0], ticks[-1]

        def time_of(x):
            return t0 + (x - x0) / (x1 - x0) * (t1 - t0)

        all_bins = {name: parts_of(each, traces[name].meta.created - begin, end) for name, each in facts.items()}
        most = max(running + waiting for parts in all_bins.values() for running, waiting, *_ in parts)
        assert root.get("aria-label") == f"3 replicas over {duration(end)}; the highest row has {most} requests"
        for row, (name, parts) in enumerate(all_bins.items()):
            top = 20 + 64 * row
            names = [words for _, y, words in texts if y in (top + 24, top + 40)]
            assert names == [name, f"{len(facts[name].order)} request{'s' * (len(facts[name].order) != 1)}"]
            scale = [words for x, y, words in texts if abs(x - 104) < 0.1 and y in (top + 10, top + 56)]
            assert scale == [str(most), "0"]
            percents = [(x, y, words) for x, y, words in texts if words.endswith("0%") and top < y <= top + 56]
            assert percents == [(860, top + 10, "100%"), (860, top + 56, "0%")]
            areas = {fill: d for d, fill, _ in paths if fill in (RUNNING, WAITING) and f" {top + 56}V" in d}
            heights = {fill: [float(y) for y in re.findall(r"V([\d.]+)H", d)] for fill, d in areas.items()}
            widths = [float(x) for x in re.findall(r"H([\d.]+)", areas[RUNNING])]
            assert close([time_of(x) for x in widths], [end * (i + 1) / 360 for i in range(360)], end / 5000)
            assert close(heights[RUNNING], [top + 56 * (1 - r / most) for r, *_ in parts], 0.06)
            assert close(heights[WAITING], [top + 56 * (1 - (r + w) / most) for r, w, *_ in parts], 0.06)
            for colour, place in ((KV, 2), (CACHED, 3)):
                (line,) = [d for d, _, stroke in paths if stroke == colour and inside(d, top)]
                ys = [float(pair.split()[1]) for pair in line[1:].split("L")]
                assert close(ys, [top + 56 * (1 - part[place]) for part in parts], 0.06)
        boxes = [(r.get("fill"), float(r.get("x"))) for r in root.iter() if r.get("width") == "12"]
        legend = {colour: [words for left, _, words in texts if left == x + 18] for colour, x in boxes}
        assert legend[RUNNING] == ["running requests"] and legend[WAITING] == ["waiting"]
        assert legend[KV] == ["KV blocks in use, %"] and legend[CACHED] == ["with those kept in the prefix cache"]
        frames = [r for r in root.iter() if r.get("stroke") == WAY]
        expected = []
        for row, (name, each) in enumerate(facts.items()):
            mine = [step for step in range(len(each)) if each[step].chunk(asked)]
            if mine:
                start = traces[name].meta.created - begin
                expected.append((start + each.records[mine[0]].time, start + each.records[mine[-1]].end, 20 + 64 * row))
        assert len(frames) == len(expected) == 1
        for frame, (first, last, top) in zip(frames, expected):
            left, wide = float(frame.get("x")), float(frame.get("width"))
            assert close([time_of(left), time_of(left + wide)], [first, last], end / 4000)
            assert float(frame.get("y")) == top
        assert f"the way of {asked}" in [words for *_, words in texts]
        assert not any("the way" in t.text for t in ET.fromstring(fleet_svg(traces)).iter() if t.tag.endswith("text"))
        idle = ET.fromstring(fleet_svg(traces | {"idle": Trace(TraceMeta(created=begin + end / 2))}))
        assert [text.text for text in idle.iter() if text.text in ("idle", "0 requests")] == ["idle", "0 requests"]
        with pytest.raises(ValueError, match="nothing to draw"):
            fleet_svg({"idle": Trace(TraceMeta())})
        with pytest.raises(ValueError, match="no step in any"):
            fleet_svg(traces, "nobody")


def test_two_fleets_beside_each_other_have_the_same_axes(fleet_run):
    """Both are drawn as one fleet of all replicas would be, in other places."""
    from workbench.viz.fleet_rows import fleet_svg, fleet_svgs

    def drawn(picture):
        """Heights and words of each row, and the times of the axis."""
        root = ET.fromstring(picture)
        areas = [re.findall(r"V([\d.]+)H", path.get("d")) for path in root.iter() if "Z" in path.get("d", "")]
        heights = [[float(y) - 64 * (i // 2) for y in area] for i, area in enumerate(areas)]
        return heights, [text.text for text in root.iter() if text.tag.endswith("text")], root.get("viewBox").split()[2]

    traces = list(fleet_run.traces)
    left, right = ({"replica 0": traces[0]}, {"replica 0": traces[1], "replica 1": traces[2]})
    together = drawn(fleet_svg({f"replica {number}": trace for number, trace in enumerate(traces)}))
    (a, words_a, wide_a), (b, words_b, wide_b) = map(drawn, fleet_svgs([left, right]))
    assert len(a) == 2 and len(b) == 4 and wide_a == wide_b == "360"
    assert all(close(one, other, 0.06) for one, other in zip(a + b, together[0], strict=True))
    for words, names in ((words_a, ["replica 0"]), (words_b, ["replica 0", "replica 1"])):
        assert [word for word in words if word.startswith("replica")] == names
        assert [word for word in words if word.endswith(" s")] == [w for w in together[1] if w.endswith(" s")]
    assert fleet_svgs([left]) == [fleet_svg(left)]


def test_fleets_without_a_clock_have_an_axis_of_steps(fleet_run):
    """Each second of their clock is a step; a label stands in the middle of its place."""
    from workbench.viz.fleet_rows import fleet_svgs

    traces = dict(zip("ab", fleet_run.traces))
    end = max(trace.meta.created + trace[-1].end for trace in traces.values()) - min(
        trace.meta.created for trace in traces.values()
    )
    root = ET.fromstring(fleet_svgs([traces], "steps")[0])
    texts = [(float(text.get("x")), text.text) for text in root.iter() if text.get("text-anchor") == "middle"]
    places = [(x, float(re.fullmatch(r"([\d.]+) steps", words)[1])) for x, words in texts]
    assert len(places) > 2 and all(abs(x - 110 - value / end * (900 - 110 - 46)) < 0.1 for x, value in places)


def inside(path, top):
    first = float(path[1:].split("L")[0].split()[1])
    return top - 0.1 <= first <= top + 56.1 and "V" not in path


def parts_of(facts, start, end):
    """In 360 parts of the time: most running, most waiting, highest shares of blocks in use and with content."""
    parts, usable = [None] * 360, facts.num_blocks - 1
    for step, record in enumerate(facts.records):
        held = usable - record.free_blocks
        now = (len(record.running), len(record.waiting), held / usable, (held + len(facts[step].cached)) / usable)
        first = int(360 * (start + record.time) / end)
        last = min(359, int(360 * (start + record.end) / end))
        for i in range(first, last + 1):
            if parts[i] is None:
                parts[i] = now
                continue
            running, waiting, *shares = parts[i]
            both, most = max(running + waiting, now[0] + now[1]), max(running, now[0])
            parts[i] = (most, both - most, *map(max, shares, now[2:]))
    kept, found = 0.0, []
    for part in parts:
        found.append(part or (0, 0, 0.0, kept))
        kept = found[-1][3]
    return found


def test_the_table_of_a_fleet(fleet_run, tmp_path):
    from workbench.viz.fleet_page import fleet_html

    fleet_run.save(tmp_path)
    with Fleet(tmp_path) as fleet:
        facts = {name: Facts(trace) for name, trace in fleet.traces.items()}
        rows = Tables(re.sub(r"<svg.*?</svg>", "", fleet_html(fleet))).tables[-1]
        heads = [
            "", "running, now (most)", "waiting, now (most)", "KV in use, now (most)", "steps", "requests",
            "output tokens/s with idle time", "preemptions", "TTFT mean", "TTFT p99", "ITL mean", "ITL p99",
        ]  # fmt: skip
        assert rows[0] == heads
        for row, (name, each) in zip(rows[1:], facts.items()):
            first = [v for s in range(len(each)) for is_first, v in each.latencies(s).values() if is_first]
            more = [v for s in range(len(each)) for is_first, v in each.latencies(s).values() if not is_first]
            out = sum(map(len, each[-1].tokens.values())) / (each.records[-1].end - each.records[0].time)
            running, waiting = (max(len(getattr(r, what)) for r in each.records) for what in ("running", "waiting"))
            most = max(1 - r.free_blocks / (each.num_blocks - 1) for r in each.records)
            assert row[:1] + row[4:6] == [name or "", str(len(each)), str(len(each.order))] or row[0] == ""
            assert row[1:4] == [f"0 ({running})", f"0 ({waiting})", f"0.0% ({most:.1%})"]
            assert row[4:6] == [str(len(each)), str(len(each.order))]
            assert float(row[6]) == pytest.approx(out, rel=0.01)
            assert row[7] == str(sum(len(r.preempted) for r in each.records))
            values = [sum(first) / len(first), percentile(first, 99), sum(more) / len(more), percentile(more, 99)]
            assert all(near(cell, seconds(value)) for cell, value in zip(row[8:], values)), (row, values)
        assert rows[-1][4:6] == [str(sum(map(len, facts.values()))), "24"]


def test_runs_one_after_another_do_not_add_up():
    """The most of all at one moment, although the first step of each took no time."""
    from workbench.viz.fleet_page import _now
    from workbench.viz.fleet_rows import fleet_svg

    traces = []
    for created in (1000.0, 1100.0):
        trace, other = run("timed 2")[0], None
        other = Trace(replace(trace.meta, created=created))
        for info in trace.requests.values():
            other.add_request(info)
        for record in trace:
            other.append(record)
        traces.append(other)
    assert traces[0][0].end == 0.0
    most = max(len(record.running) for record in traces[0])
    assert _now(traces)[0] == f"0 ({most})"
    label = ET.fromstring(fleet_svg({"one": traces[0]})).get("aria-label")
    assert label.startswith(f"1 replicas over {traces[0][-1].end:.4g} s")


@pytest.mark.parametrize("num_steps", [3, 9, 20])
def test_the_table_of_a_fleet_that_runs(num_steps):
    from workbench.viz.fleet_page import fleet_html

    traces = {}
    for name in ("plain 1", "spec 16", "async 24"):
        trace = run(name)[0]
        traces[name] = trace[: min(num_steps, len(trace))]
    fleet = SimpleNamespace(traces=traces, folder="here", note="", metrics=lambda: metrics(traces["plain 1"]))
    rows = Tables(re.sub(r"<svg.*?</svg>", "", fleet_html(fleet))).tables[-1]
    total_running = total_waiting = 0
    for row, trace in zip(rows[1:], traces.values()):
        last = list(trace)[-1]
        running = len(set(last.running) - {*last.finished, *last.aborted})
        total_running, total_waiting = total_running + running, total_waiting + len(last.waiting)
        assert row[1].split()[0] == str(running) and row[2].split()[0] == str(len(last.waiting))
        blocks = trace.num_blocks - 1
        assert row[3].split()[0] == f"{(blocks - last.free_blocks_end) / blocks:.1%}"
    assert rows[-1][1].split()[0] == str(total_running) and rows[-1][2].split()[0] == str(total_waiting)


# -- comparisons and causes --------------------------------------------------------------------------------------------


def spoken(value, timed):
    if not timed:
        return f"{value:.3g} step{'' if value == 1 else 's'}"
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{value / size:.3g} {unit}"
    raise AssertionError


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("same", [False, True])
def test_comparison(name, same):
    first, second, *facts = pair(name)
    if same:
        second, facts = first, [facts[0], facts[0]]
    found = comparison_facts(first, second)
    timed = facts[0].timed
    assert found["unit"] == ("s" if timed else "steps")
    differs = [first_difference(*(each[-1].tokens[who] for each in facts)) >= 0 for who in facts[0].order]
    assert found["same_tokens"] == (not any(differs))
    rows = {row[0]: row[1:] for row in found["rows"]}
    assert sorted(rows) == sorted(facts[0].order)
    firsts, pauses = [[], []], [[], []]
    for who, row in rows.items():
        (ta, ia, wa), (tb, ib, wb) = (compared(each, who) for each in facts)
        assert row == [pytest.approx(value) for value in (ta, tb, ia, ib, wa, wb)]
        for side, each in enumerate(facts):
            firsts[side].append((ta, tb)[side])
            found_ = [each.latencies(s).get(who) for s in range(len(each))]
            pauses[side] += [value for is_first, value in filter(None, found_) if not is_first]
    weighed = {
        "mean TTFT": [fmean(side) for side in firsts],
        "mean ITL": [fmean(side) for side in pauses],
        "longest TTFT": [max(side) for side in firsts],
        "longest pause": [max(side) for side in pauses],
        "P99 TTFT": [percentile(sorted(side), 99) for side in firsts],
        "P99 ITL": [percentile(sorted(side), 99) for side in pauses],
    }
    changes = [] if timed else [("steps", *map(len, facts))]
    changes += [("most KV blocks in use", *(each.num_blocks - 1 - min(r.free_blocks for r in each.records)
                                            for each in facts))] if not timed else []  # fmt: skip
    said = found["verdict"].split("; ")
    shown = {row[0]: row[1:3] for row in found["measures"]}
    for name in ("longest TTFT", "longest pause"):
        assert (name in shown) == (name in found["verdict"]), "the table has what the sentence names"
        if name in shown:
            assert near(" ".join(shown[name]), " ".join(spoken(value, timed) for value in weighed[name]))
    if same:
        assert said == ["nothing changes, every step is as before"]
        return
    counts = [f"{what} {one} -> {other}" for what, one, other in changes if one != other]
    assert [line for line in said if line.startswith(("steps", "most"))] == counts
    shares = {name: after / before - 1 for name, (before, after) in weighed.items()}
    rates = {row[0]: row[1:3] for row in found["measures"] if timed and row[0].startswith("output tokens")}
    for rate, (before, after) in rates.items():  # a larger one is better
        shares[rate] = float(before.replace(",", "")) / float(after.replace(",", "")) - 1
    told = [line for line in said if line not in counts]
    for word, sign in (("worse", 1), ("better", -1)):
        (name, share), *_ = sorted(shares.items(), key=lambda item: -sign * item[1])
        lines = [line for line in told if line.startswith(f"{word}: ")]
        assert len(lines) == (sign * share >= 0.03), (lines, shares)
        if lines:
            before, after = rates.get(name) or (spoken(value, timed) for value in weighed[name])
            assert near(lines[0].rpartition(" (")[0], f"{word}: {name} {before} -> {after}")
    if all(abs(share) < 0.03 for share in shares.values()):
        assert told[0].startswith(
            "neither mean TTFT, P99 TTFT, mean ITL, P99 ITL, longest TTFT nor longest pause changes"
        )
    parted = found["first_divergence"]
    step = next((i for i, (a, b) in enumerate(zip(*(each.records for each in facts)))
                 if [(c.request_id, c.start, c.num_tokens) for c in a.chunks]
                 != [(c.request_id, c.start, c.num_tokens) for c in b.chunks]), None)  # fmt: skip
    assert (parted and parted["step"]) == step


def test_a_run_whose_pool_is_not_known_has_no_number_of_blocks_in_the_comparison():
    requests = [{"id": "a", "prompt": {"len": 40}, "max_tokens": 4}]
    first, known = (simulate({"requests": requests, "config": {"max_num_batched_tokens": n}}) for n in (16, 32))
    second = Trace(replace(known.meta, config={"max_num_batched_tokens": 32}))
    for info in known.requests.values():
        second.add_request(info)
    for record in known:
        second.append(record)
    assert (first.num_blocks, second.num_blocks) == (known.num_blocks, None)
    for pair_ in ((first, second), (second, first)):
        assert "most KV blocks" not in comparison_facts(*pair_)["verdict"]


def test_traces_that_cannot_be_compared_say_so():
    first = simulate({"requests": [{"id": "a", "prompt": {"len": 5}}]})
    other = simulate({"requests": [{"id": "b", "prompt": {"len": 5}}]})
    assert list(comparison_facts(first, other)) == ["refused"]


def explained():
    """A long prompt is ahead of short ones; their tokens come slowly behind it."""
    requests = [{"id": "long", "prompt": {"len": 900}, "max_tokens": 3, "arrival_time": 0.1}]
    requests += [
        {"id": f"r{i}", "prompt": {"len": 60 + i}, "max_tokens": 40, "arrival_time": 0.101 + i / 1000} for i in range(6)
    ]
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 3, "num_blocks": 80, "enable_prefix_caching": False}
    return simulate({"config": config, "requests": requests, "cost_model": COSTS})


def test_the_parts_of_an_explanation(deno_page):
    trace = explained()
    for who in trace.requests:
        found = trace.explain(who)
        facts = explanation_facts(found, confirmed=False)
        spans = [("from arrival to the end", found.total, found.parts)]
        spans += [(found.ttft.name, found.ttft.total, found.ttft.parts)] if found.ttft else []
        spans += [(gap.name, gap.total, gap.parts) for gap in found.gaps[:2]]
        spans = [span for span in spans if span[1] > 0]
        assert facts["request"] == who and facts["confirmation"] == ""
        assert [span["name"] for span in facts["spans"]] == [name for name, *_ in spans]
        for span, (_, total, parts) in zip(facts["spans"], spans):
            parts = [part for part in parts if part.amount > 0]
            assert span["total"] == amount(total, found.unit)
            for made, part in zip(span["parts"], parts, strict=True):
                assert made["cause"] == part.cause and made["kind"] == part.kind
                assert made["share"] == pytest.approx(part.amount / total) and near(
                    made["amount"], amount(part.amount, found.unit)
                )
                assert made["culprits"] == list(part.culprits[:3])
                used = used_in(trace, part, who) if part.kind == "token_budget" else {}
                assert made["tokens"] == [said(used[name]) if used else "" for name in made["culprits"]]
                others = len(part.culprits) - 3
                left = sum(used.values()) - sum(used[name] for name in made["culprits"]) if used else 0
                assert made["more"] == (f"{others} more{said(left) if used else ''}" if others > 0 else "")
                assert not used or list(used) == list(part.culprits)
                assert (made["first"], made["last"]) == (part.steps[0], part.steps[-1])
                assert made["is_own"] == (part.kind in ("own", *IDLE))
                assert made["is_listed"] == (part.amount >= 0.005 * total)
        check_drawer(deno_page, trace, who, facts)
    assert explanation_facts(trace.explain("r0"))["confirmation"].startswith("Time")


def used_in(trace, part, who):
    """The tokens that others got of the budget in the steps of a part, the largest first."""
    used = Counter()
    for step in part.steps:
        used.update({chunk.request_id: chunk.num_tokens for chunk in trace[step].chunks})
    assert who not in used
    order = {name: i for i, name in enumerate(part.culprits)}
    return dict(sorted(used.items(), key=lambda item: (-item[1], order[item[0]])))


def said(tokens):
    return f" ({tokens:,} token{'' if tokens == 1 else 's'})"


def span_lasting(*lengths, is_open=False):
    """The facts of the whole time of an explanation whose parts have these lengths."""
    parts = [
        SimpleNamespace(
            cause=f"part of {long}",
            amount=long,
            culprits=(),
            who=lambda: ([], ""),
            steps=(1, 2),
            kind="own",
            is_culprit=False,
        )
        for long in lengths
    ]
    none = SimpleNamespace(name="gap before token 3", total=0.0, parts=())
    (whole,) = explanation_facts(
        SimpleNamespace(
            request_id="a",
            unit="s",
            total=sum(lengths),
            parts=parts,
            ttft=None,
            waiting=None,
            is_open=is_open,
            gaps=(none,),
            confirmation=None,
            division="",
            verdict="",
        )
    )["spans"]
    return whole


def parts_lasting(*lengths):
    return span_lasting(*lengths)["parts"]


@pytest.mark.parametrize("is_open", [False, True])
def test_the_time_of_a_request_that_has_not_ended_is_up_to_the_end_of_the_trace(is_open):
    assert span_lasting(1.0, is_open=is_open)["name"].endswith(" of the trace") is is_open


def test_the_card_and_the_page_say_that_a_request_is_never_served(deno_page):
    trace = Trace.load(Path(__file__).parents[1] / "data" / "vllm-recorded" / "sync" / "d7_too_big.jsonl.gz")
    facts = {who: explanation_facts(trace.explain(who), confirmed=False) for who in trace.requests}
    served = explanation_facts(explained().explain("r0"), confirmed=False)
    for verdict, words in ((served["verdict"], ""), (facts["big"]["verdict"], "Never served: its wait never clears ")):
        assert verdict.startswith(words) and bool(verdict) == bool(words)
        shown = {who: {**fact, "verdict": verdict} for who, fact in facts.items()}
        incident = incident_facts(trace) | ({} if words else {"never": []})
        deno_page.open(trace, status={"live": False, "explanations": shown, "incident": incident})
        deno_page("view.inspector.pin(argument), page.frame()", {"kind": "request", "request": 0})
        assert (words in deno_page("view.inspector.why.textContent")) and (
            "Never served" in deno_page("view.inspector.why.textContent")
        ) == bool(words)
        deno_page("(view.panel('incident').layout(), view.panel('incident').showSlow())")
        slow = deno_page("view.panel('incident').slow.textContent")
        assert slow.count("never served; ") == (2 if words else 0), slow


def test_a_part_of_no_length_is_left_out():
    assert [part["cause"] for part in parts_lasting(2.0, 0.0)] == ["part of 2.0"]


def test_a_part_of_half_a_percent_is_listed_and_a_shorter_one_is_not():
    assert [part["is_listed"] for part in parts_lasting(199.0, 1.0)] == [True, True]
    assert [part["is_listed"] for part in parts_lasting(199.5, 0.5)] == [True, False]


def check_drawer(page, trace, who, facts):
    """The drawer shows bars as wide as the shares, and a line for each part with its requests and steps."""
    page.open(trace, status={"live": False, "explanations": {who: facts}})
    page("view.inspector.pin(argument), page.frame()", {"kind": "request", "request": list(trace.requests).index(who)})
    heads = page("view.inspector.why.querySelectorAll('h4').map((head) => head.textContent)")
    assert heads == [f"{span['name']}: {span['total']}" for span in facts["spans"]]
    bars = page(
        "view.inspector.why.querySelectorAll('.wb-bar-of-parts').map((bar) => bar.children.map((part) => "
        "[part.getAttribute('style'), part.dataset.kind, part.getAttribute('title')]))"
    )
    lines = page(
        "view.inspector.why.querySelectorAll('ul').map((list) => list.children.map((line) => "
        "line.children.slice(1).map((cell) => cell.textContent)))"
    )
    links = page(
        "view.inspector.why.querySelectorAll('ul').map((list) => list.children.map((line) => "
        "line.querySelectorAll('button').map((button) => (button.click(), [view.cursor.step, "
        "view.inspector.pinned.request]))))"
    )
    biggest = next((part["kind"] for part in facts["spans"][0]["parts"] if not part["is_own"]), None)
    for span, bar, rows, lists in zip(facts["spans"], bars, lines, links, strict=True):
        for part, (style, kind, title) in zip(span["parts"], bar, strict=True):
            assert float(style.split(":")[1]) == pytest.approx(part["share"])
            assert kind == ("own" if part["is_own"] else "biggest" if part["kind"] == biggest else "other")
            percent = int(100 * part["share"] + 0.5)
            assert title == f"{part['cause']}: {part['amount']}, {percent}%"
        listed = [part for part in span["parts"] if part["is_listed"]]
        for part, (long, words) in zip(listed, rows, strict=True):
            names = [name + tokens for name, tokens in zip(part["culprits"], part["tokens"], strict=True)]
            others = f": {', '.join(names)}" if names else ""
            more = f" and {part['more']}" if part["more"] else ""
            until = f" to {part['last']}" if part["last"] > part["first"] else ""
            places = [part["first"], *([part["last"]] if part["last"] > part["first"] else [])]
            pinned = [list(trace.requests).index(name) for name in part["culprits"]]
            clicked = lists.pop(0)
            assert [step for step, _ in clicked[len(pinned) :]] == places
            assert [request for _, request in clicked[: len(pinned)]] == pinned
            assert (long, words) == (part["amount"], f"{part['cause']}{others}{more} (step {part['first']}{until})")


def test_the_facts_of_an_incident():
    trace = explained()
    found, facts = trace.incident(), incident_facts(trace)
    assert facts["slow"] == [(one.request_id, one.cause, one.share, one.culprits) for one in found.slow]
    assert len(facts["slow"]) == 7 and facts["apart"] == [str(each) for each in found.apart]
    order = [who for who, *_ in facts["slow"]]
    latencies = {who: compared(Facts(trace), who)[0] for who in trace.requests}
    assert order == sorted(latencies, key=lambda who: -latencies[who])
    assert facts["stalls"] == [(stall.step, str(stall), stall.excess) for stall in found.stalls]
    assert tokens(trace[0])[1] > 0


def test_a_run_without_steps_holds_no_block():
    from workbench.trace.readings.two_sides import most_blocks

    empty = Trace(simulate({"requests": [{"id": "a", "prompt": {"len": 4}, "max_tokens": 1}]}).meta)
    assert empty.num_blocks and most_blocks(empty) == 0


def test_a_page_that_explains_a_few_names_the_command_for_the_others(deno_page):
    trace = simulate({"requests": [{"id": "r 0", "prompt": {"len": 9}}, {"id": "r1", "prompt": {"len": 9}}]})
    page = deno_page
    page.open(trace, status={"live": False, "explanations": {}})
    said = "view.inspector.pin(argument), page.frame(), view.inspector.why.textContent"
    for index, name in enumerate(trace.requests):
        words = page(said, {"kind": "request", "request": index})
        assert words == f"Why so long? This page does not say. Run: workbench trace explain TRACE {name}"
    assert page(said, {"kind": "block", "block": 1}) == ""


def moved(budget, tokens=6):
    """Two requests, of which the second one arrives when the first has ended, long after the change."""
    requests = [
        {"id": "a", "prompt": {"len": 150}, "max_tokens": tokens},
        {"id": "z", "prompt": {"len": 3}, "max_tokens": 9},
    ]
    requests[1] |= {"arrival_step": 40}
    return simulate({"config": {"max_num_batched_tokens": budget}, "requests": requests})


@pytest.mark.parametrize("has_ids", [True, False])
def test_tokens_that_a_recorder_leaves_out_do_not_differ(has_ids):
    first, second, *_ = pair("plain 1")
    recorded = Trace(replace(second.meta, config={**second.config, "token_ids_recorded": has_ids}))
    for info in second.requests.values():
        recorded.add_request(info)
    for record in second:
        recorded.append(record)
    found = comparison_facts(first, recorded)
    assert found["same_tokens"] is (False if has_ids else None) and bool(found["differences"]) == has_ids


def test_the_same_steps_at_other_times_are_a_change():
    requests = [{"id": f"r{i}", "prompt": {"len": 30}, "max_tokens": 6} for i in range(4)]
    first, equal, slow = (simulate({"requests": requests}, cost_model=CostModel(fixed=s)) for s in (0.01, 0.01, 0.02))
    assert [comparison_facts(first, other)["first_divergence"] for other in (equal, slow)] == [None, None]
    assert comparison_facts(first, equal)["verdict"] == "nothing changes, every step is as before"
    assert comparison_facts(first, slow)["verdict"].startswith("worse: mean TTFT 10 ms -> 20 ms")


def test_a_verdict_of_equal_counts_says_what_moves(deno_page):
    first, second = moved(192), moved(64)
    found = comparison_facts(first, second)
    assert (
        len(first) == len(second) and first.metrics().requests["a"].e2e.steps < second.metrics().requests["a"].e2e.steps
    )
    assert found["verdict"] == (
        "no number of steps, blocks, preemptions or cached tokens changes; the work of 1 request moves to other steps "
        "or chunks, first that of a in step 0"
    )
    assert comparison_facts(first, first)["verdict"] == "nothing changes, every step is as before"
    unmoved = "neither mean TTFT, P99 TTFT, mean ITL, P99 ITL, longest TTFT nor longest pause changes"
    assert comparison_facts(first, moved(192, tokens=7))["verdict"] == f"{unmoved}; 1 request ends later"
    assert comparison_facts(first, moved(192, tokens=5))["verdict"] == f"{unmoved}; 1 request ends earlier"
    deno_page.open(first, second, width=1100)
    deno_page.painted("compare")
    assert deno_page("view.panel('compare').gains.hidden"), "a table of dashes"
    deno_page.open(first, moved(192, tokens=7), width=1100)
    deno_page.painted("compare")
    assert not deno_page("view.panel('compare').gains.hidden")
