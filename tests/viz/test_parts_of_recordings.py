"""Pages of a part of a recording: every number, text and block is what the page of the whole shows in the same step."""

import gzip
import json
import random
import re
from base64 import b64decode, b64encode
from collections import Counter
from pathlib import Path
from unittest.mock import ANY

import pytest
from facts_of_records import Facts, holders_in_words
from msgspec.structs import replace
from painted import LIGHT, Marks
from runs_to_draw import COSTS, dressed, run
from test_marks_in_pictures import Tables
from test_marks_of_the_pool import Picture, next_evicted

from workbench import simulate
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.clock import time_of_day
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.window import window
from workbench.viz.app import TracePage
from workbench.viz.classroom import Classroom
from workbench.viz.export_html import PagePlace, html_page
from workbench.viz.feed import Feed
from workbench.viz.link import link_to
from workbench.viz.palette import EVENT_MARKS

ROOT = Path(__file__).parents[2]

SHOWN = """(() => {
  const { store, inspector, cursor } = view, texts = view.panel("texts"), requests = {}, blocks = {};
  texts.changed?.("step"), texts.render();
  const words = (parts) => [parts].flat().map((part) => String(part?.words ?? part)).join("");
  const facts = ({ rows }) => Object.fromEntries(rows.map(([name, parts]) => [name, words(parts)]));
  const first = store.label(0), labels = (step) => store.label(step);
  for (const request of store.requests) {
    const { index } = request, card = texts.cards.get(request), count = store.numHere(request, cursor.step);
    requests[request.id] = {
      state: card?.state.textContent ?? null,
      output: card?.output.textContent ?? null,
      card: facts(inspector.request({ request: index })),
      row: texts.tableData().rows.find(([id]) => id === request.id) ?? null,
      tokens: request.tokens.slice(0, count).map((token, number) => [
        labels(token.step),
        facts(inspector.token({ request: index, number })),
      ]),
    };
  }
  for (let block = 1; block < store.pool.size; block++) blocks[block] = facts(inspector.block({ block }));
  const scheduled = store.requests.filter((request) => store.lastChunk(request, cursor.step) >= 0).map(({ id }) => id);
  return { requests, blocks, first, scheduled };
})()"""

RUNS = (
    "plain 1", "plain 4", "timed 3", "timed 4", "async 24", "spec 16", "async_spec 41", "async_spec 16",
    "spec_hybrid 51", "hybrid_window_prefix 36", "cut 0",
)  # fmt: skip


def shown(page, trace, steps):
    """The words of a page of a trace on requests, tokens and blocks in some of the run's steps."""
    page.open(trace)
    found = []
    for step in steps:
        page.seek(step - trace[0].step)
        page("page.frame()")
        found.append(page(SHOWN))
    return found


def cuts(trace, rng):
    """A part from a step on, that part from a file, and what a run that forgets its beginning keeps."""
    at = rng.randrange(1, len(trace) - 2)
    part = trace[at:]
    return at, {"slice": part, "forgotten": forgotten(trace, at)}


def forgotten(trace, at):
    """The same run, which has forgotten the steps before one."""
    run = Trace(trace.meta)
    infos = sorted(trace.requests.values(), key=lambda info: info.arrival_step)
    for record in trace:
        while infos and infos[0].arrival_step <= record.step:
            run.add_request(infos.pop(0))
        run.append(record)
    kept = run.continued_from(trace[at:].keyframe)
    kept.end = trace.end
    return kept


def is_as_in(part, whole, is_known, *, state):
    """Whether a page of a part says of a request what the page of the whole says."""
    if not is_known:
        assert "up to" in part["state"] and "up to" in part["card"]["size"]
        return
    assert part["state"].split(" · ")[1] == whole["state"].split(" · ")[1]
    assert part["card"]["size"] == whole["card"]["size"]
    if state:
        assert part["state"] == whole["state"] and part["card"]["state"] == whole["card"]["state"]
        assert part["row"][1] == whole["row"][1]
    assert part["row"][2] == whole["row"][2]


@pytest.mark.parametrize("name", RUNS)
def test_a_part_counts_as_the_whole(deno_page, name):
    trace, rng = run(name)[0], random.Random(name)
    if not trace[0].chunks or not any(chunk.text for record in trace for chunk in record.chunks):
        trace = dressed(trace, 1)
    is_ahead = any(chunk.ahead for record in trace for chunk in record.chunks)
    for _ in range(3):
        at, parts = cuts(trace, rng)
        steps = sorted({at, rng.randrange(at, len(trace)), len(trace) - 1})
        on_whole = shown(deno_page, trace, steps)
        for kind, part in parts.items():
            number = outputs_before(part)
            assert kind == "forgotten" or None not in number.values()
            for whole, here in zip(on_whole, shown(deno_page, part, steps)):
                assert here["first"] == at
                for who, said in here["requests"].items():
                    expected = whole["requests"][who]
                    is_over = said["state"] and "ended before" in said["state"]
                    if said["state"] is None:
                        assert expected["state"] is None
                        continue
                    is_as_in(said, expected, number.get(who, 0) is not None, state=kind == "slice" and not is_over)
                    rest = expected["tokens"][number.get(who) or 0 :] if number.get(who, 0) is not None else []
                    assert said["tokens"] == rest
                    assert said["output"].startswith("… ") == bool(number.get(who))
                    assert expected["output"].strip().endswith(said["output"].removeprefix("… ").strip())
                for block, facts in here["blocks"].items():
                    written = whole["blocks"][block]
                    if is_ahead and facts.get("owner") not in here["scheduled"]:
                        continue  # what the scheduler knew of its KV counts drafts that are not verified yet
                    if facts["state"].startswith("cached"):  # it may have been written before the part
                        same = {"text": ANY, "last change": ANY}  # the page has no text of earlier steps
                        assert "written by" not in facts or facts | same == written | same, block
                        continue
                    for row in ("state", "owner", "owners", "KV positions"):
                        assert facts.get(row) == written.get(row), (row, block)
                    if number.get(facts.get("owner"), 0) is None:
                        continue  # the page cannot tell an output token from a draft
                    assert ("text" in facts) == ("text" in written)
                    if "last change" in facts:
                        assert facts["last change"] == written["last change"]
                    elif "last change" in written:
                        assert int(written["last change"].removeprefix("step ")) < at
                    assert "contents" not in facts or facts["contents"] == written["contents"]
                    text = facts.get("text", "")
                    if "of earlier steps" not in text:
                        assert text == written.get("text", "")
                    elif '"' in text and "…" not in text + written["text"]:
                        assert written["text"].endswith(text.split('"', 1)[1])


def crowded():
    """Three requests for whose outputs the pool has too few blocks: some are preempted, and computed again in parts."""
    requests = [{"id": f"r{i}", "prompt": {"len": 60}, "max_tokens": 40} for i in range(3)]
    config = {"max_num_batched_tokens": 20, "num_blocks": 30, "block_size": 8, "enable_prefix_caching": False}
    return simulate({"config": config, "requests": requests})


def test_a_live_run_counts_the_tokens_before_it_of_a_request_that_computes_them_again(deno_page):
    """A part of a prompt that is computed again does not mean that the request has no output yet."""
    trace, outputs, again = crowded(), Counter(), []
    for record in trace:
        for chunk in record.chunks:
            if chunk.is_partial_prefill and chunk.num_recomputed_tokens and outputs[chunk.request_id]:
                again.append((record.step, chunk.request_id))
            outputs[chunk.request_id] += len(chunk.accepted)
    (whole,) = shown(deno_page, trace, [len(trace) - 1])
    for step, who in again:
        kept = forgotten(trace[: step + 1], step)
        feed = Feed(kept)
        deno_page("page.open(argument)", {"packet": b64encode(feed.next_packet()).decode()})
        feed.confirm()
        for record in trace[step + 1 :]:
            kept.append(record)
        take = "(page.values.packet = page.bytes(argument), page.listeners['change:packet'](), page.frame())"
        deno_page(take, b64encode(feed.next_packet()).decode())
        deno_page.seek(len(kept) - 1)
        assert deno_page(SHOWN)["requests"][who]["card"]["size"] == whole["requests"][who]["card"]["size"], (step, who)
    assert len(again) > 1


@pytest.mark.parametrize("name", [*RUNS, "long 3"])
def test_a_part_frames_the_blocks_that_a_step_changed(deno_page, name):
    """Also in its first step: what was there before has not changed in it."""
    trace, facts = run(name)
    rng, framed, kept = random.Random(f"changed {name}"), 0, 0
    for _ in range(3):
        at, parts = cuts(trace, rng)
        for part in parts.values():
            deno_page.open(part)
            for step in sorted({*range(at, min(at + 8, len(trace))), rng.randrange(at, len(trace))}):
                marks, picture = Marks(deno_page.painted("pool", step - at)["marks"]), Picture(facts, 1200)
                frames = {tuple(frame[1:3]) for frame in marks.frames(LIGHT.outline) if frame[2] > picture.top - 1}
                blocks = facts[step].fresh
                expected = {tuple(value + 0.5 for value in picture.xy(block)) for block in blocks}
                assert frames == expected, (at, step)
                framed += len(frames)
                kept += len(facts[step].holders) - len(blocks) if step == at else 0
    assert framed and kept > 0


@pytest.mark.parametrize("name", [*RUNS, "long 3"])
def test_a_part_names_the_block_that_is_evicted_next(deno_page, name):
    """The order of the free queue before the part counts, in which blocks are not in order of their ids."""
    trace, facts = run(name)
    rng, out_of_order = random.Random(f"next {name}"), 0
    for _ in range(3):
        at, parts = cuts(trace, rng)
        for part in parts.values():
            deno_page.open(part)
            for step in sorted({*range(at, min(at + 6, len(trace))), rng.randrange(at, len(trace))}):
                deno_page.painted("pool", step - at)
                expected = next_evicted(facts[step])
                assert deno_page("view.panel('pool').nextEvicted") == (expected or -1), (at, step)
                out_of_order += expected is not None and expected != min(facts[step].cached & {*facts[step].queue})
    assert out_of_order or not any(facts[step].cached for step in range(len(trace)))


def searched(page, trace, query, step):
    """The answer of a page to a search at a step of the run, and the card that it opens."""
    page.seek(step - trace[0].step)
    return page(
        """((search, { store, inspector, cursor }) => {
          search.input.value = argument;
          search.typed();
          const [{ words, go }] = search.found;
          inspector.pin(null);
          go?.();
          const { request, ...pinned } = inspector.pinned ?? {};
          return { words, step: store.label(cursor.step), pinned, request: store.requests[request]?.id ?? null };
        })(view.controls.search, view)""",
        query,
    )


WRITTEN = r"(?:written|found in the prefix cache) in step (\d+)"


def steps_that_computed(trace, who, position):
    """The steps that ran a position of a request or found it in the prefix cache."""
    found = []
    for record in trace:
        for chunk in record.chunks:
            begin = chunk.start - chunk.ahead
            is_cached = position < min(begin, chunk.num_cached_tokens)
            if chunk.request_id == who and (is_cached or begin <= position < begin + chunk.num_tokens):
                found.append(record.step)
    return found


def check_none(words, steps, first, last):
    """Whether the words for a position that no block of a part holds are true."""
    here = [step for step in steps if first <= step <= last]
    if words == "it has never been computed":
        assert not steps
    elif words == f"it has not been computed up to step {last}, where this part ends":
        assert not [step for step in steps if step <= last]
    elif words == f"it was computed before step {first}, and its block has been given back":
        assert [step for step in steps if step < first] and not here
    elif words == f"no step from {first} to {last} has computed it":
        assert not here
    else:
        step = re.fullmatch(r"step (\d+) found it in the prefix cache, outside the window, which .*", words)[1]
        assert int(step) in here


@pytest.mark.parametrize("name", RUNS)
def test_a_search_in_a_part_finds_the_block_of_the_whole(deno_page, name):
    trace, facts = run(name)
    rng, num_older = random.Random(f"search {name}"), 0
    for _ in range(6):
        at = rng.randrange(1, len(trace) - 3)
        end = rng.randrange(at + 2, len(trace) + 1)
        first, parts = trace[at].step, (trace[at:end], forgotten(trace, at))
        asked = [
            (who, rng.randrange(trace.requests[who].num_prompt_tokens + 6), rng.randrange(at, end))
            for who in rng.choices(list(parts[0].requests), k=12)
        ]
        deno_page.open(trace)
        on_whole = [searched(deno_page, trace, f"{who} {position}", step) for who, position, step in asked]
        for part in parts:
            deno_page.open(part)
            for (who, position, step), whole in zip(asked, on_whole):
                if who not in part.requests:
                    continue
                here, steps = (
                    searched(deno_page, part, f"{who} {position}", step),
                    steps_that_computed(trace, who, position),
                )
                said, written = re.search(WRITTEN, here["words"]), re.search(WRITTEN, whole["words"])
                places = facts[at].tables.get(who, [[]] * len(facts.groups))[facts.shown_group]
                is_held = [block for block in places[position // trace.block_size :][:1] if block]
                none = f"Token {position} of {who} is in no KV block: "
                if written and first <= int(written[1]) <= part[-1].step:
                    assert here == whole
                elif written and int(written[1]) < first and is_held and position < part.keyframe.num_kv_computed[who]:
                    assert here["words"] == re.sub(WRITTEN, f"written before step {first}", whole["words"])
                    assert (here["pinned"], here["request"]) == (whole["pinned"], whole["request"])
                    num_older += 1
                elif said:
                    assert int(said[1]) > step and int(said[1]) in steps, "it was computed again"
                else:
                    assert here["words"].startswith(none) and not here["pinned"]
                    check_none(here["words"].removeprefix(none).removesuffix("."), steps, first, part[-1].step)
    assert num_older


def test_a_part_of_a_name_finds_a_token(deno_page):
    """It is the rule for a request alone: any part that only one name has, in any case of letters."""
    names = ["cmpl-bench-5-6-0-af07", "cmpl-bench-5-26-0-b517", "cmpl-bench-5-26-1-c0de", "Long", "long one", "run 12"]
    requests = [{"id": name, "prompt": {"len": 20 + i}, "max_tokens": 4} for i, name in enumerate(names)]
    trace = simulate({"requests": requests})
    deno_page.open(trace)

    def found(query):
        return searched(deno_page, trace, query, trace[-1].step)["words"]

    whole = found("cmpl-bench-5-26-0-b517 9")
    assert whole.startswith("Token 9 of cmpl-bench-5-26-0-b517: block ")
    for part in ("cmpl-bench-5-26-0", "5-26-0", "26-0", "B517", "26-0 token", "26-0 position"):
        assert found(f"{part} 9") == whole
    assert found("bench 9") == "3 requests have “bench” in their names: give more of the name."
    assert found("cmpl-bench-5-26 9") == "2 requests have “cmpl-bench-5-26” in their names: give more of the name."
    assert found("Long 9").startswith("Token 9 of Long: ") and found("LONG ONE 9").startswith("Token 9 of long one: ")
    assert found("long 9").startswith("Token 9 of Long: "), "the whole name goes before a part of another"
    assert found("run 12").startswith("The panels show only run 12.")
    assert found("un 1").startswith("The panels show only run 12.")
    assert found("run 12 3").startswith("Token 3 of run 12: ")
    assert found("26-0 1,000") == "Token 1,000 of cmpl-bench-5-26-0-b517 is in no KV block: it has never been computed."
    assert found("nobody 9").startswith("No request has “nobody 9” in its name.")


def test_a_search_says_who_holds_a_block_that_a_request_has_given_back(deno_page):
    trace = Trace.load(ROOT / "docs/data/run.jsonl.gz")
    facts, numbers = Facts(trace), set()
    deno_page.open(trace)
    for who, info in trace.requests.items():
        for step in range(13, len(trace), 3):
            for position in range(0, info.num_prompt_tokens, trace.block_size):
                words = searched(deno_page, trace, f"{who} {position}", step)["words"]
                if not (said := re.search(r"block (\d+), .*step \d+\. (.+)", words)):
                    continue
                first, *others = facts[step].holders.get(int(said[1]), []) or [None]
                numbers.add(len(others) if first else None)
                names = holders_in_words([first, *others], facts.order) if first else ""
                given = f"{who} has given it back since; {names} {'hold' if others else 'holds'} it."
                assert said[2] == (given if first else "The block has been given back since.")
    assert {None, 0, 2} <= numbers


@pytest.mark.parametrize("name", ["timed 3", "spec 16"])
def test_the_table_of_a_part_counts_as_that_of_the_whole(name):
    trace = run(name)[0]
    for at in range(1, len(trace) - 1, 5):
        tables = [
            {row[0]: row[1:3] for row in re.findall("<tr><td.*?>(.*?)</td><td.*?>(.*?)</td><td.*?>(.*?)</td>", html)}
            for html in (trace._repr_html_(), trace[at:]._repr_html_())
        ]
        assert tables[1] and tables[1].items() <= tables[0].items()


def test_the_table_of_a_run_that_has_forgotten_steps_has_no_wrong_number():
    """A request that gets no token in the steps that are kept may have had some before."""
    trace, unknown = crowded(), 0
    for at in range(1, len(trace) - 1):
        known = trace[: at + 2]
        kept = forgotten(known, at)
        whole = Tables(known._repr_html_()).tables[-1][1:]
        given = {chunk.request_id for record in kept for chunk in record.chunks if chunk.accepted}
        for row in Tables(kept._repr_html_()).tables[-1][1:]:
            assert row[:3] in [other[:3] for other in whole] or (row[2] == "–" and row[0] not in given), (at, row)
            unknown += row[2] == "–"
    assert unknown


def page_around(trace, around, path):
    """The place at which the page of a part opens that `workbench trace html --around` writes."""
    trace.save(path / "run.jsonl.gz")
    assert main(["trace", "html", str(path / "run.jsonl.gz"), str(path / "run.html"), "--around", around]) == 0
    data = re.search('id="place">(.*?)<', (path / "run.html").read_text())[1]
    return json.loads(gzip.decompress(b64decode(data)))


def test_a_page_around_a_request_opens_at_it(deno_page, tmp_path):
    trace = run("timed 3")[0]
    who = next(c.request_id for r in trace for c in r.chunks if r.step > len(trace) // 2)
    first = next(r.step for r in trace if any(c.request_id == who for c in r.chunks))
    place = page_around(trace, who, tmp_path)
    assert place == {"view": None, "step": first, "request": who, "card": True}
    deno_page.open(window(trace, around=who), cursor={**place, "follow": False})
    deno_page("page.frame()")
    assert deno_page("view.store.label(view.cursor.step)") == first
    assert deno_page("view.store.requests[view.inspector.pinned.request].id") == who


def test_pages_and_links_around_a_request_that_never_ran_begin_where_it_last_waited(tmp_path, monkeypatch, capsys):
    requests = [{"id": "long", "prompt": {"len": 300}, "max_tokens": 60}]
    requests += [{"id": "left", "prompt": {"len": 9}, "arrival_time": 0.3, "abort_step": 40}]
    trace = simulate({"config": {"max_num_seqs": 1}, "requests": requests, "cost_model": COSTS})
    waited = [record.step for record in trace if "left" in record.waiting]
    assert len(waited) > 3 and waited[-1] == 39 and not any(c.request_id == "left" for r in trace for c in r.chunks)
    place = page_around(trace, "left", tmp_path)
    assert place == {"view": None, "step": 39, "request": "left", "card": True}
    served = []
    monkeypatch.setattr("workbench.viz.app.serve", lambda source, **options: served.append(options["opens_at"]))
    file = str(tmp_path / "run.jsonl.gz")
    assert main(["trace", "watch", file, "--around", "left"]) == 0
    assert served == [PagePlace(None, 39, "left", card=True)]
    capsys.readouterr()
    for given, step, request in (([], 39, "left"), (["--step", "30"], 30, None), (["--request", "long"], 39, "long")):
        assert main(["trace", "link", file, "--around", "left", *given]) == 0
        part = window(trace, around="left")
        assert capsys.readouterr().out.strip() == link_to(part, step=step, request_id=request)


def test_a_served_page_opens_at_its_place_once():
    trace = run("timed 3")[0]
    page = TracePage(Feed(trace, room=Classroom()), opens_at=PagePlace(None, 5, "r1", card=True))
    assert page.cursor == {"step": 5, "follow": False, "request": "r1", "card": True} and page.step == 5
    page.cursor = {"step": 9, "follow": False, "request": None}  # the visitor goes elsewhere
    assert page.cursor == {"step": 9, "follow": False, "request": None}
    other = TracePage(Feed(trace, room=Classroom()), opens_at=PagePlace(None, 5, "r1", card=True))
    assert other.cursor["step"] == 5, "each visitor begins there"


def test_a_page_around_a_time_opens_at_it(tmp_path):
    trace = run("timed 3")[0]
    dated = Trace(replace(trace.meta, created=1_000_000_000.25))
    for info in trace.requests.values():
        dated.add_request(info)
    for record in trace:
        dated.append(record)
    middle = trace[len(trace) // 2]
    place = page_around(dated, time_of_day(dated.meta.created, int(middle.time + 0.5)), tmp_path)
    assert place["request"] is None and not place["card"]
    assert abs(trace[place["step"]].time - middle.time) < 2


def test_a_part_without_arrivals_has_its_requests(deno_page):
    """Its first line counts them, and no head of a table stands above nothing."""
    trace = run("timed 3")[0]
    at = 1 + max(info.arrival_step for info in trace.requests.values())
    at = max(at, 1 + max(r.step for r in trace if any(c.start == 0 for c in r.chunks)))
    part = trace[max(at, len(trace) - 3) :]
    deno_page.open(part)
    deno_page("page.frame()")
    words = deno_page("(view.panel('incident').layout(), view.panel('incident').words())")
    number = len({chunk.request_id for record in part for chunk in record.chunks})
    assert re.match(rf"{number} requests? in .*, none arrived here;", words), words
    assert not any(record.admitted for record in part) and "hit rate" not in words
    deno_page("view.panel('incident').showSlow()")
    assert deno_page("view.panel('incident').slow.querySelectorAll('thead').length") == 0


@pytest.mark.parametrize("name", ["timed 3", "timed 4", "idle 1"])
def test_the_page_of_a_part_has_as_many_requests_as_the_commands(deno_page, name):
    """ "N requests" is one number; those that arrived in the part are another, which is said."""
    trace, rng, fewer = run(name)[0], random.Random(f"requests {name}"), 0
    for _ in range(8):
        begin, end = sorted(rng.sample(range(len(trace)), 2))
        part = window(trace, begin=trace[begin].time, end=trace[end].end)
        here = len(part.requests)
        assert f" {here} request" in str(part) and len(metrics(part).requests) == here
        arrived = sum(part[0].time <= info.arrival_time <= part[-1].end for info in part.requests.values())
        first, last = part[0].step, part[-1].step
        deno_page.open(part)
        words = [deno_page("(view.panel('incident').layout(), view.panel('incident').words())")]
        deno_page.open(trace)
        if last - first > 6:  # a page does not show fewer steps
            deno_page("view.cursor.moveTo(argument[0], argument[1])", [first, last + 1 - first])
            words.append(deno_page("(view.panel('incident').layout(), view.panel('incident').words())"))
        for said in words if first else ():
            said = said.split("; ")[0]
            assert said.startswith(f"{here} request{'s' * (here != 1)} in "), (said, here)
            assert said.endswith(f", {arrived or 'none'} arrived here") == (arrived < here), (said, arrived)
            fewer += 0 < arrived < here
    assert fewer or name == "idle 1"


METRICS = """((panel) => {
  panel.layout();
  const [first, next] = panel.metrics, store = view.store;
  const request = store.requests.find(({ id }) => id === argument[1]), step = argument[0] - store.label(0);
  const number = request.tokens.findIndex((token) => token.step === step);
  return [first, next].map((metric) => panel.written(metric, step, "none")).concat(store.latencySteps(request, number));
})(view.panel("metrics"))"""


@pytest.mark.parametrize("name", ["plain 1", "timed 3", "async 24", "spec 16"])
def test_the_first_step_of_a_part_has_the_latencies_of_the_whole(deno_page, name, tmp_path):
    trace, rng = run(name)[0], random.Random(f"latencies {name}")
    giving = [(r.step, c.request_id) for r in trace for c in r.chunks if c.accepted and r.step]
    for step, who in rng.sample(giving, 6):
        part = trace[step:]
        part.save(tmp_path / "part.jsonl")
        deno_page.open(trace)
        whole = deno_page(METRICS, [step, who])
        tokens = metrics(trace).requests[who].token_steps
        first, place = trace.requests[who].arrival_step, tokens.index(step)
        assert whole[2] == (step - tokens[place - 1] if place else step + 1 - first)
        for each in (part, forgotten(trace, step), Trace.load(tmp_path / "part.jsonl")):
            deno_page.open(each)
            assert deno_page(METRICS, [step, who]) == whole, (step, who)


def test_a_gap_that_a_part_does_not_know_is_called_unknown(deno_page):
    trace = run("timed 3")[0]
    step = next(record.step for record in trace if record.num_decode_tokens)
    part = Trace(trace.meta)
    for info in trace[step + 1 :].requests.values():
        part.add_request(info)
    part.start_from(replace(trace[step + 1 :].keyframe, last_tokens={}))
    for record in trace[step + 1 :]:
        part.append(record)
    who = next(c.request_id for c in part[0].chunks if c.arm == "decode")
    deno_page.open(part)
    assert deno_page(METRICS, [step + 1, who])[1:] == ["unknown: the token before is not here", "NaN"]


def test_a_request_that_arrives_when_a_part_ends_is_in_it(deno_page):
    """As for the commands: steps of one second, and a request at the end of each."""
    requests = [{"id": f"r{i}", "prompt": {"len": 9}, "max_tokens": 30, "arrival_time": float(i)} for i in range(20)]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=1.0))
    begin, end = trace[2], trace[9]
    assert end.end == trace.requests["r10"].arrival_time
    deno_page.open(trace)
    deno_page("view.cursor.moveTo(argument[0], argument[1])", [begin.step, end.step + 1 - begin.step])
    words = deno_page("(view.panel('incident').layout(), view.panel('incident').words())")
    assert words.startswith("11 requests in 8 s, 9 arrived here;"), words
    assert len(window(trace, begin=begin.time, end=end.end).requests) == 11


def test_what_is_said_of_a_part_does_not_speak_of_the_whole_run(deno_page):
    """The end card, the link, the buttons and the badge name the steps that a run has kept."""
    trace = run("timed 3")[0]
    at = len(trace) - 9
    kept, first, last = forgotten(trace, at), trace[at].step, trace[-1].step
    tokens = sum(len(chunk.accepted) for record in kept for chunk in record.chunks)
    said = {}
    for name, shown, live in (("whole", trace, True), ("kept", kept, True), ("saved", kept, False)):
        deno_page.open(shown, status={"live": live, "state": "idle", "step": len(shown), "explains": True})
        deno_page("page.frame()")
        deno_page("void (view.linkBox.show = (title, link, opener, about) => about)")
        said[name] = deno_page(
            """({
                card: view.endCard.words(),
                save: view.endCard.save.attributes.title,
                badge: view.controls.badgeText(),
                link: view.linkBox.take("http://127.0.0.1:5007/#run=abc"),
                title: view.linkBox.button().attributes.title,
            })"""
        )
    assert re.match(
        r"\d+ requests, [\d,]+ prompt tokens and \d+ output tokens in \d+ steps and ", said["whole"]["card"]
    )
    expected = (
        f"{len(kept.requests)} requests and {tokens} output tokens in 9 steps that are kept, steps {first} to {last}"
    )
    assert said["kept"]["card"].startswith(f"{expected}, and "), said["kept"]["card"]
    assert said["kept"]["save"] == f"Save steps {first} to {last} as one page that opens offline"
    assert said["whole"]["save"] == "Save the whole run as one page that opens offline"
    assert f"which hold steps {first} to {last}." in said["kept"]["link"]
    assert "which hold the whole run." in said["whole"]["link"]
    assert said["saved"]["badge"].endswith(f" · steps {first} to {last} of a longer run")
    assert said["whole"]["badge"].startswith("live")
    assert "whole run" not in " ".join(said["kept"].values())


def test_the_title_of_a_run_that_has_forgotten_steps_names_those_that_it_keeps():
    trace = run("timed 3")[0]
    at = len(trace) - 9
    title = re.search("<title>(.*?)</title>", html_page(forgotten(trace, at)))[1]
    assert title.endswith(f", steps {trace[at].step} to {trace[-1].step} of a longer run")


def test_a_part_marks_no_preemption_that_was_before_it(deno_page):
    trace = Trace.load(ROOT / "docs/data/run.jsonl.gz")
    at = next(record.step for record in trace if record.preempted) + 1
    num_marks = {}
    for first in (at - 1, at):
        part = trace[first:]
        deno_page.open(part, width=1100)
        marks = Marks(deno_page.painted("gantt", 0)["marks"])
        num_marks[first] = sum(len(path) == 3 for colour, path in marks.filled() if colour == EVENT_MARKS["preempt"][1])
    # The legend has one.
    assert num_marks[at - 1] == num_marks[at] + 1
