"""Events, texts, cards and sentences of the code that browsers run: every word is a fact of the record."""

import random
from statistics import median

import pytest
from facts_of_records import holders_in_words
from msgspec.structs import replace
from painted import Marks, counted, grouped, seconds, span
from runs_to_draw import RUNS, run, steps_of
from test_marks_of_batches import WORDS, copied, drafts, group_words, kv, limit
from test_marks_of_steps import near, why_waiting

from workbench import simulate
from workbench.analysis.misses import why_missed
from workbench.trace import Trace, TraceMeta
from workbench.trace.errors import TraceError
from workbench.trace.lines import Supplement
from workbench.trace.readings.narrate import shown


def reasons(facts, step):
    """The events of a step, with the reason of a preemption as a view shows it."""
    record = facts.records[step]
    return [
        (number, kind, name, shown(record.preempt_reasons.get(name)) if kind == "preempt" else why)
        for number, kind, name, why in facts.events(step)
    ]


def missed(facts, who, step):
    """Why an admission found no more in the prefix cache, for prompts that begin like another one."""
    infos = facts.trace.requests
    first = infos[who].prompt_token_ids[:2]
    others = [info.prompt_token_ids[:2] for name, info in infos.items() if name != who]
    resumed = who in facts.records[step - facts.records[0].step].resumed
    if not resumed and first not in others and first[:1] not in others:
        return ""
    try:
        misses = why_missed(facts.trace, who)
    except (ValueError, TraceError):
        return ""
    short = misses.in_short(step)
    for miss in misses:
        if miss.token_ids is None or miss.culprit is None or miss.why not in short:
            continue
        mine, other = infos[who].prompt, infos[miss.culprit].prompt
        while mine and other and mine[0] == other[0]:
            mine, other = mine[1:], other[1:]
        if mine and other:
            parts = [text if len(text) <= 16 else f"{text[:15]}…" for text in (mine, other)]
            words = f"after the same beginning its prompt has “{parts[0]}”, that of {miss.culprit} has “{parts[1]}”"
            size = facts.groups[miss.group].block_size
            tokens = range(facts.trace.requests[who].num_prompt_tokens)[miss.block * size :][:size]
            place = f"tokens {tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else f"token {tokens[0]}"
            return f"its block {miss.block} ({place}) was never computed: {words}"
    return short


def test_the_list_of_events_has_the_newest_300(deno_page):
    requests = [{"id": f"r{i}", "prompt": {"len": 3}, "max_tokens": 2, "arrival_step": 3 * i} for i in range(170)]
    trace = simulate({"requests": requests})
    deno_page.open(trace)
    rows = deno_page.table("events", len(trace) - 1)["rows"]
    events = [(r.step, e) for r in trace for e, names in (("admit", r.admitted), ("finish", r.finished)) if names]
    assert [(row[0], row[1]) for row in rows] == events[:-301:-1]


@pytest.mark.parametrize("name", [*RUNS, "cut 0", "cut 2"])
def test_events(drawn, name):
    page, facts, _ = drawn(name)
    for step in steps_of(facts, 5):
        expected = []
        for earlier in range(step, -1, -1):
            expected += [event for event in reversed(reasons(facts, earlier)) if event[1] != "arrive"]
        rows = page.table("events", step)["rows"]
        assert [row[:3] for row in rows] == [list(event[:3]) for event in expected]
        for row, (number, kind, who, why) in zip(rows, expected):
            more = missed(facts, who, number) if kind in ("admit", "resume") else ""
            assert row[3][:199] == "; ".join(filter(None, [why, more]))[:199]
        page("view.panel('events').changed('step'), view.panel('events').frame()")
        painted = page(
            "view.panel('events').rows.children.map((row) => "
            "[row.dataset.step, row.classList.contains('wb-now'), ...row.children.map((cell) => cell.textContent)])"
        )
        label = facts.records[0].step
        assert [[int(row[2]), *row[4:6]] for row in painted] == [list(event[:3]) for event in expected]
        assert [(int(row[0]), row[1]) for row in painted] == [(e[0] - label, e[0] == label + step) for e in expected]
        marks = page("view.panel('events').rows.children.map((row) => row.children[1].firstChild.className)")
        shapes = {"admit": "up", "resume": "half", "preempt": "down", "finish": "square", "abort": "cross"}
        assert marks == [f"wb-mark wb-mark-{shapes[event[1]]}" for event in expected]
        record = facts.records[step]
        note = page("view.panel('events').note.textContent")
        assert note == waiting_words(facts, record)
    page("view.setFilter(argument)", facts.order[-1])
    rows = page.table("events")["rows"]
    assert [row[2] for row in rows] == [e[2] for e in expected if facts.order[-1] in e[2]]
    page("view.setFilter('')")


@pytest.mark.parametrize("name", ["plain 1", "timed 3"])
def test_the_list_of_events_follows_the_cursor(drawn, name):
    """A step without events marks none, although the list is the same; a click on a row goes to its step."""
    page, facts, _ = drawn(name)
    has_events = [bool([e for e in facts.events(step) if e[1] != "arrive"]) for step in range(len(facts))]
    step = next(step for step in range(len(facts) - 1) if has_events[step] and not has_events[step + 1])
    for at in (step, step + 1, step):
        page("(view.cursor.seek(argument), view.panel('events').changed('step'), view.panel('events').frame(), 1)", at)
        marked = "view.panel('events').rows.children.filter((row) => row.classList.contains('wb-now')).length"
        assert bool(page(marked)) == (at == step)
    count = page("view.panel('events').rows.children.length")
    for place in {0, count // 2, count - 1}:
        label = int(page("view.panel('events').rows.children[argument].children[0].textContent", place))
        page("(view.panel('events').rows.children[argument].click(), 1)", place)
        at = label - facts.records[0].step
        assert page("view.cursor.step") == at
        page("(({ rows, onclick }) => (onclick(rows[0]), 1))(view.panel('events').tableData())")
        newest = max(
            e[0] for s in range(label - facts.records[0].step + 1) for e in facts.events(s) if e[1] != "arrive"
        )
        assert page("view.cursor.step") == newest - facts.records[0].step


def waiting_words(facts, record):
    """The number of waiting requests, and each reason with the requests that it holds for, unless these are all."""
    if not record.waiting:
        return "No request is waiting."
    parts = {}
    for name in (name for name in facts.order if name in record.waiting):
        if why := shown(record.passed_over.get(name, record.waiting_reason)):
            parts.setdefault(why, []).append(name)
    said = []
    for why, names in parts.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        whose = f"{', '.join(names[:3])}{more}: " if len(names) < len(record.waiting) else ""
        said.append(whose + (why if len(why) <= 160 else f"{why[:159]}…"))
    return f"{len(record.waiting)} waiting in this step{': ' if said else ''}{'; '.join(said)}"


def written(token, has_text):
    return token.text or ("" if has_text else f"{token.id} ")


def chunks_of(facts, name, until=None):
    """The chunks of a request up to a step, with their steps."""
    last = len(facts) if until is None else until + 1
    return [(step, facts[step].chunk(name)) for step in range(last) if facts[step].chunk(name)]


def end_of(chunk):
    return chunk.start - chunk.ahead + chunk.num_tokens


def output(facts, name, step):
    return [token for token in facts[-1].tokens[name] if token.step <= facts.records[step].step]


@pytest.mark.parametrize("name", [*RUNS, "cut 0", "cut 2"])
def test_texts(drawn, name):
    page, facts, _ = drawn(name)
    has_drafts = any(chunk.drafts for record in facts.records for chunk in record.chunks)
    # The pages of a run with prompts know its texts.
    has_text = {who: bool(facts.trace.requests[who].prompt) or any(t.text for t in facts[-1].tokens[who])
                for who in facts.order}  # fmt: skip
    for step in steps_of(facts, 6):
        here = [who for who in facts.order if who in facts[step].states]
        table = page.table("texts", step)
        rows = table["rows"]
        assert table["caption"] == f"Texts at step {grouped(facts.records[step].step)}"
        tokens = {who: output(facts, who, step) for who in here}
        assert rows == [
            [who, facts[step].states[who], len(tokens[who]), "".join(written(t, has_text[who]) for t in tokens[who])]
            for who in here
        ]
        page("view.panel('texts').stale.add('data'), view.panel('texts').frame()")
        cards = page(
            "view.panel('texts').list.children.map((card) => [Number(card.dataset.request), "
            "card.querySelector('.wb-state').textContent, card.querySelector('.wb-output').textContent])"
        )
        assert [card[0] for card in cards] == [facts.order.index(who) for who in here]
        assert page("view.panel('texts').note.hidden")  # of the requests without a card, from 41 on
        names = "view.panel('texts').list.children.map((card) => (card.querySelectorAll('button')[1].click(), "
        assert page(f"{names}view.inspector.pinned.request))") == [card[0] for card in cards]
        page("view.inspector.pin(null)")
        for (_, state, text), who in zip(cards, here):
            assert text == "".join(written(token, has_text[who]) for token in tokens[who])
            most = facts.trace.requests[who].max_tokens
            assert state == f"{progress(facts, who, step)} · {len(tokens[who])} of {grouped(most)} tokens"
        if has_drafts:
            check_tokens(page, facts, here, tokens, step, has_text)


def progress(facts, who, step):
    state = facts[step].states[who]
    if state in ("waiting", "aborted"):
        return state
    if state == "preempted":
        return "preempted, waiting to be recomputed"
    if state == "finished":
        return next(facts.end_of(who, record) for record in facts.records if who in record.finished)
    if output(facts, who, step):
        return "decoding"
    done = chunks_of(facts, who, step)
    computed = end_of(done[-1][1]) if done else 0
    return f"prefilling {grouped(computed)} of {grouped(facts.trace.requests[who].num_prompt_tokens)}"


def check_tokens(page, facts, here, tokens, step, has_text):
    for place, who in enumerate(here):
        spans = page(
            "view.panel('texts').list.children[argument].querySelector('.wb-output').children.map((span) => "
            "[span.dataset.step, span.dataset.number, span.dataset.id, span.dataset.drafted ?? '', span.textContent, "
            "span.className])",
            place,
        )
        first = facts.records[0].step
        assert [row[:5] for row in spans] == [
            [str(t.step - first), str(i), str(t.id), "true" if t.drafted else "", written(t, has_text[who])]
            for i, t in enumerate(tokens[who])
        ]
        last = [i for i, t in enumerate(tokens[who]) if t.step == facts.records[step].step]
        marked = [i for i, row in enumerate(spans) if row[5] == "wb-now"]
        assert len(marked) == bool(last) and set(marked) <= set(last)
        for i, token in list(enumerate(tokens[who]))[:6]:
            page(
                "view.panel('texts').pointed = view.panel('texts').list.children[argument[0]], "
                "view.panel('texts').hovered({ clientX: 0, clientY: 0, buttons: 0, target: "
                "view.panel('texts').list.children[argument[0]].querySelector('.wb-output').children[argument[1]] })",
                [place, i],
            )
            lines = page("view.tooltip.text").split("\n")
            expected = [f"token {i + 1} (id {token.id})", f"sampled in step {token.step}"]
            together = [other for other in tokens[who] if other.step == token.step]
            if len(together) > 1:
                ids = " ".join(str(other.id) for other in together)
                expected.append(f"with {counted(len(together) - 1, 'accepted draft')} and the token after: ids {ids}")
            assert lines == expected
            assert page("[view.cursor.hover.request, view.cursor.hover.step]") == [
                facts.order.index(who), token.step - first
            ]  # fmt: skip
    page("view.cursor.setHover({})")


CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"


def ends(text):
    return text if len(text) <= 180 else f"{text[:60]} … {text[-120:]}"


@pytest.mark.parametrize(
    ("prompt", "shown_", "more"),
    [
        ("Why?", "Why?", ""),
        ("y" * 180, "y" * 180, ""),
        ("".join(map(str, range(200))), None, "show all"),
        (CHAT, "Why is the sky blue?", "show template"),
        ("0123456789" * 1300, None, "show all"),
        ("", "3 prompt tokens", ""),
    ],
)
def test_a_prompt_is_shown_from_both_ends(deno_page, prompt, shown_, more):
    """A press shows all of it, as far as it is sent; the number of characters beyond that is said."""
    first = simulate({"requests": [{"id": "a", "prompt": {"len": 3}, "max_tokens": 2}]})
    trace = Trace(first.meta)
    trace.add_request(replace(first.requests["a"], prompt=prompt))
    for record in first:
        trace.append(record)
    deno_page.open(trace)
    deno_page("view.panel('texts').stale.add('data'), view.panel('texts').frame()")
    find = "view.panel('texts').list.children[0].querySelector('.wb-prompt')"
    kept, rest = prompt[:12_000], max(0, len(prompt) - 12_000)
    text = deno_page(f"{find}.textContent")
    assert text == " ".join(filter(None, [shown_ or ends(kept), more]))
    if more:
        text = deno_page(f"({find}.querySelector('button').click(), {find}.textContent)")
        beyond = f" … ({rest:,} more characters)" if rest else ""
        assert text == f"{kept}{beyond} show less"


def test_a_view_without_steps_says_so(deno_page):
    deno_page.open(Trace(TraceMeta(config={"num_blocks": 20})))
    said = "No steps yet."
    for panel, y, words in (
        ("packed", 40, said),
        ("rectangle", 14, said),
        ("metrics", 16, said),
        ("incident", 16, "No times yet."),
    ):
        texts = Marks(deno_page.painted(panel)["marks"]).texts()
        assert texts == [(84, y, words)], panel
    deno_page("view.panel('events').stale.add('data'), view.panel('events').frame()")
    assert deno_page("view.panel('events').note.textContent") == said
    assert deno_page("view.panel('timeline').describe()") == "no steps yet"


# -- the drawer --------------------------------------------------------------------------------------------------------

STATES = {
    "waiting": "waiting",
    "running": "running",
    "preempted": "preempted, waiting to be recomputed",
    "finished": "finished",
    "aborted": "aborted",
    "": "not arrived yet",
}


def drawer(page, **pinned):
    kind = pinned["kind"]
    title, rows = page(f"((found) => [found.title, page.facts(found.rows)])(view.inspector.{kind}(argument))", pinned)
    return title, [tuple(row) for row in rows]


def tables_at(facts, step, who):
    """The table of the shown group, also in the last step of a request."""
    tables = facts[step].tables.get(who)
    return tables[facts.shown_group] if tables else []


@pytest.mark.parametrize("name", RUNS)
def test_the_card_of_a_request(drawn, name):
    page, facts, _ = drawn(name)
    for step in steps_of(facts, 5):
        page.seek(step)
        for index, who in enumerate(facts.order):
            title, rows = drawer(page, kind="request", request=index)
            assert title == who
            info, state, chunk = facts.trace.requests[who], facts[step].states.get(who, ""), facts[step].chunk(who)
            tokens = output(facts, who, step)
            expected = [
                ("state", STATES[state]),
                ("size", f"{counted(info.num_prompt_tokens, 'prompt token')}, {len(tokens)} of up to "
                 f"{counted(info.max_tokens, 'output token')}"),
            ]  # fmt: skip
            if chunk:
                expected.append(("this step", f"{WORDS[chunk.arm]}: {counted(chunk.num_tokens, 'token')}, {kv(chunk)}"))
                expected.append(("why not more", limit(chunk)))
                expected += [("drafts", drafts(chunk))] if chunk.drafts else []
                if chunk.num_cached_tokens:
                    expected.append(("prefix cache", f"{counted(chunk.num_cached_tokens, 'token')} found"))
            elif state in ("waiting", "preempted"):
                expected.append(("why not in this step", why_waiting(facts, step, who)[:200] or "–"))
            elif state == "finished":
                expected.append(("end", progress(facts, who, step)))
            table = tables_at(facts, step, who)
            if table:
                held = [f"block {block} " for block in table if block][:6]
                expected.append((counted(len(table), "KV block"), "".join(held) + ("…" if len(table) > 6 else "")))
            if done := chunks_of(facts, who):
                first, last = (facts.records[done[place][0]].step for place in (0, -1))
                expected.append(("scheduled in", f"{counted(len(done), 'step')}: from step {first} to step {last}"))
            if tokens:
                expected.append(("newest token", token_words(tokens[-1])))
            assert [row for row in rows if row[0] != "not found"] == expected
            page("view.inspector.pin(argument), page.frame()", {"kind": "request", "request": index})
            cells = page("view.inspector.facts.children.map((cell) => cell.textContent)")
            assert cells == [words for row in rows for words in row]
            assert page("view.inspector.title.textContent") == who


def computed_in(facts, who, position, step):
    """The step that computed a position up to a step, else the first after it, and whether the cache had it."""
    found = []
    for at, chunk in chunks_of(facts, who):
        start = chunk.start - chunk.ahead
        if start <= position < end_of(chunk):
            found.append((at, False))
        elif position < chunk.num_cached_tokens and position < start:
            found.append((at, True))
    before = [each for each in found if each[0] <= step]
    return before[-1] if before else found[0] if found else None


@pytest.mark.parametrize("name", RUNS)
def test_the_card_of_a_block(drawn, name):
    page, facts, _ = drawn(name)
    for step in steps_of(facts, 5):
        page.seek(step)
        moment = facts[step]
        for block in range(facts.num_blocks):
            title, rows = drawer(page, kind="block", block=block, position=3)
            rows = dict(rows)
            assert title == f"KV block {block}"
            if block == 0:
                assert rows == {"state": "reserved, never handed out"}
                continue
            names = moment.holders.get(block, [])
            kinds = {
                "free": "free",
                "owned": "in use",
                "cached": "cached: a request with the same beginning can still hit it",
            }
            expected = {"state": kinds[moment.pool_state(block)]}
            if names:
                expected["owners" if len(names) > 1 else "owner"] = holders_in_words(names, facts.order)
                expected |= contents(facts, step, block)
            if moment.pool_state(block) == "cached":
                expected |= origin(facts, written_by(facts, step)[block])
            size = facts.groups[facts.shown_group].block_size
            expected["token"] = f"3, slot {3 % size} of {size}"
            if block in moment.changed:
                expected["last change"] = f"step {moment.changed[block]}"
            assert rows == expected, (step, block)


def written_by(facts, step):
    """The last request that computed each block, with its group, its place and the step that began it."""
    found = {}
    for at, record in enumerate(facts.records[: step + 1]):
        for chunk in record.chunks:
            added = [chunk.new_block_ids, *(change.new_block_ids for change in chunk.other_groups)]
            for group, table in enumerate(record.block_tables_by_group[chunk.request_id]):
                size = facts.groups[group].block_size
                for logical, block in enumerate(table):
                    if block in added[group] and logical * size >= chunk.num_cached_tokens:
                        found.pop(block, None)
                    if block not in found and chunk.start - chunk.ahead <= logical * size < end_of(chunk):
                        found[block] = chunk.request_id, group, logical, at
    return found


def origin(facts, place):
    """The rows of a cached block."""
    who, group, logical, at = place
    found, kind = {"written by": f"{who} from step {facts.records[at].step}"}, facts.groups[group]
    if len(facts.groups) > 1:
        found["group"] = f"{group}: {group_words(kind)}"
    if kind.kind == "mamba":
        return found | {"state slot": grouped(logical)}
    first, last = logical * kind.block_size, (logical + 1) * kind.block_size
    return found | {"KV positions": span(first, last)} | text_of(facts, who, first, last)


def contents(facts, step, block):
    moment, found = facts[step], {}
    group, logical = next(
        (group, table.index(block))
        for name in facts.order
        if name in moment.tables
        for group, table in enumerate(moment.tables[name])
        if block in table
    )
    owner, kind = moment.holders[block][0], facts.groups[group]
    if len(facts.groups) > 1:
        found["group"] = f"{group}: {group_words(kind)}"
    if kind.kind == "mamba":
        return found | {"state slot": grouped(logical)}
    size = kind.block_size
    first, done = logical * size, chunks_of(facts, owner, step)
    last = min(first + size, end_of(done[-1][1]) if done else 0)
    found["KV positions"] = f"[{grouped(first)}, {grouped(first + size)}), {max(0, last - first)} of {size} filled"
    if made := computed_in(facts, owner, first, step):
        label = facts.records[made[0]].step
        found["contents"] = f"{'found in the prefix cache in' if made[1] else 'written from'} step {label}"
    return found | text_of(facts, owner, first, last)


def text_of(facts, owner, first, last):
    """The row of the text of some positions, if they have any."""
    found, info, tokens = {}, facts.trace.requests[owner], facts[-1].tokens[owner]
    places = range(max(first, info.num_prompt_tokens), last)
    text = "".join(
        tokens[at - info.num_prompt_tokens].text or f"⟨token {tokens[at - info.num_prompt_tokens].id}⟩"
        for at in places
        if at - info.num_prompt_tokens < len(tokens)
    )
    if text:
        texts = [tokens[at - info.num_prompt_tokens].text for at in places if at - info.num_prompt_tokens < len(tokens)]
        shown = text if len(text) <= 80 else text[:79] + "…"
        of_prompt = info.num_prompt_tokens - first
        before = f"{counted(of_prompt, 'prompt token')}, then " if of_prompt > 0 else ""
        found["text"] = before + (f'"{shown}"' if any(texts) else shown)
    elif last > first and first < info.num_prompt_tokens:
        of_prompt = info.num_prompt_tokens - first
        drafts = last > info.num_prompt_tokens  # of which none has a place among the tokens
        found["text"] = counted(of_prompt, "prompt token") if drafts else "part of the prompt"
    return found


def token_words(token):
    """A text in quotes, or what stands for a missing one, without."""
    return f'"{token.text}"' if token.text else f"⟨token {token.id}⟩"


def test_a_text_that_was_not_recorded_is_not_in_quotes(deno_page):
    """A placeholder in quotes would read as if the model had said it."""
    trace, facts = run("plain 1")
    nameless = Trace(replace(trace.meta, config={**trace.meta.config, "token_ids_recorded": False}))
    for info in trace.requests.values():
        nameless.add_request(info)
    for record in trace:
        nameless.append(record)
    deno_page.open(nameless)
    deno_page.seek(len(facts) - 1)
    said = []
    for index, who in enumerate(facts.order):
        tokens = facts[-1].tokens[who]
        if tokens:
            said.append(dict(drawer(deno_page, kind="request", request=index)[1])["newest token"])
            said.append(drawer(deno_page, kind="token", request=index, number=0)[0])
    assert len(said) > 8 and set(said) == {"⟨not recorded⟩"}
    blocks = {block for moment in facts.moments for block in moment.holders}
    texts = [dict(drawer(deno_page, kind="block", block=block)[1]).get("text") for block in sorted(blocks)]
    rest = {text.split(", then ")[-1] for text in texts if text and not text.endswith("prompt tokens")}
    assert rest <= {"not recorded", "part of the prompt", "1 prompt token"}


@pytest.mark.parametrize("name", RUNS)
def test_the_card_of_a_token(drawn, name):
    page, facts, _ = drawn(name)
    size = facts.groups[facts.shown_group].block_size
    page.seek(len(facts) - 1)
    for index, who in enumerate(facts.order):
        tokens, prompt = facts[-1].tokens[who], facts.trace.requests[who].num_prompt_tokens
        for number in sorted({0, 1, len(tokens) // 2, len(tokens) - 1} & set(range(len(tokens)))):
            token = tokens[number]
            title, rows = drawer(page, kind="token", request=index, number=number)
            assert title == token_words(token)
            chunk = facts[token.step - facts.records[0].step].chunk(who)
            expected = [
                ("of", who),
                ("sampled in", f"step {token.step}"),
                ("place", f"output token {number + 1}, position {grouped(prompt + number)}, id {token.id}"),
                ("by", f"{WORDS[chunk.arm]}, {kv(chunk)}"),
            ]
            made = computed_in(facts, who, prompt + number, len(facts) - 1)
            table = tables_at(facts, made[0], who) if made else []
            if (prompt + number) // size < len(table):
                block = table[(prompt + number) // size]
                expected.append(("its KV", f"block {block}, written in step {facts.records[made[0]].step}"))
            assert rows == expected


def test_the_candidates_of_a_token(deno_page):
    """Of several tokens of a request in a step, each has its own."""
    facts, trace = run("spec 16")[1], copied(run("spec 16")[0])
    step = next(s for s, record in enumerate(facts.records) if any(len(c.accepted) > 1 for c in record.chunks))
    record = facts.records[step]
    tops = []
    for chunk in record.chunks:
        for token in chunk.accepted:
            candidates = [
                {"id": token, "probability": 0.625, "drawn": 0.75, "text": f"w{token}"},
                {"id": 5, "probability": 0.25, "drawn": 0.25},
                {"id": 6, "probability": 0.0005, "drawn": 0.0, "removed_by": "top_p"},
            ]
            tops.append(
                {"request": chunk.request_id, "sampled": token, "candidates": candidates, "how": f"drew {token}"}
            )
    trace.add_supplement(Supplement(record.step, "top_tokens", {"tokens": tops}))
    deno_page.open(trace)
    for index, who in enumerate(facts.order):
        for number, token in enumerate(facts[-1].tokens[who]):
            deno_page(
                "view.inspector.pin(argument), page.frame()", {"kind": "token", "request": index, "number": number}
            )
            bars = deno_page("view.inspector.facts.querySelectorAll('.wb-bars li').map((bar) => bar.textContent)")
            how = deno_page("view.inspector.facts.querySelectorAll('.wb-how').map((line) => line.textContent)")
            if token.step != record.step:
                assert not bars
                continue
            drawn_ = f'"w{token.id}" 62.5% sampled drawn with 75.0%'
            assert bars == [drawn_, "token 5 25.0%", "token 6 0.05% removed by top p"] and how == [f"drew {token.id}"]


# -- the way of a request ----------------------------------------------------------------------------------------------


def way(page, index):
    page("view.store.requests[argument].wait = null", index)
    return page("page.module && page.facts(page.wayOf(view, view.store.requests[argument]))", index)


@pytest.fixture
def way_page():
    """A page whose module exports the function of the way, which the view calls only for its own questions."""
    from pages_in_deno import DENO, Page

    from workbench.viz.bundle import bundle

    if not DENO.exists():
        pytest.skip("deno is not installed")
    page = Page(bundle().replace("export default", "globalThis.page.wayOf = $way.wayOf;\nexport default"))
    yield page
    page.close()


def biggest(record, besides):
    others = [chunk for chunk in record.chunks if chunk.request_id != besides]
    return max(others, key=lambda chunk: chunk.num_tokens) if others else None


def waited(facts, who):
    """The wait of a request as a view says it: how long, and the causes in order."""
    info, done = facts.trace.requests[who], chunks_of(facts, who)
    first = done[0][0] if done else len(facts)
    begin = info.arrival_step - facts.records[0].step
    parts, took = [], None
    clock = facts.timed and info.arrival_time > 0
    if clock:
        until = facts.records[first].time if first < len(facts) else facts.records[-1].end
        took = max(0.0, until - info.arrival_time)
        busy = facts.records[begin - 1].end - info.arrival_time if begin else 0.0
        if busy > 0.002:
            chunk = biggest(facts.records[begin - 1], who)
            more = f", with {counted(chunk.num_tokens, 'token')} of {chunk.request_id}" if chunk else ""
            parts.append(f"the rest of step {facts.records[begin - 1].step}{more}")
        elif begin < len(facts) and facts.records[begin].time - info.arrival_time > 0.002:
            parts.append("the engine stood still")
    groups = []
    for step in range(begin, first):
        record = facts.records[step]
        reason = record.passed_over.get(who, record.waiting_reason)
        key = reason and (reason.kind, reason.limit, reason.behind)
        if groups and groups[-1][0] == key:
            groups[-1][3] = step
        else:
            groups.append([key, reason, step, step])
    for _, reason, step, last in groups:
        words, chunk = (shown(reason) or "not scheduled")[:200], biggest(facts.records[step], who)
        if reason is not None and reason.root == "token_budget" and chunk:
            words += f", {grouped(chunk.num_tokens)} of it by {chunk.request_id}"
        words += f" in step {facts.records[step].step}"
        parts.append(words + (f" to step {facts.records[last].step}" if last > step else ""))
    if not parts:
        return "for the next step" if not done else None
    long = seconds(took) if clock else counted(first - begin, "step")
    more = f"; and {len(parts) - 3} more causes" if len(parts) > 3 else ""
    return f"{long}: {'; '.join(parts[:3])}{more}"


@pytest.mark.parametrize("name", [*RUNS, "cut 0", "cut 2"])
def test_the_way_of_a_request(way_page, name):
    trace, facts = run(name)
    way_page.open(trace)
    for index, who in enumerate(facts.order):
        found = [tuple(row) for row in way(way_page, index)]
        rows, done, tokens = dict(found), chunks_of(facts, who), facts[-1].tokens[who]
        wait = waited(facts, who)
        said = rows["waited" if done else "waits"]
        assert wait is None or near(said, wait), (said, wait)
        if not done:
            continue
        assert rows["prompt"] == prompt_words(facts, who, done, tokens)
        lost = [
            ("preempted", f"in step {number}{f': {why[:160]}' if why else ''}")
            for step in range(len(facts))
            for number, kind, name_, why in reasons(facts, step)
            if kind == "preempt" and name_ == who
        ]
        assert [row for row in found if row[0] == "preempted"] == lost[:3]
        if not tokens:
            assert "first token" not in rows
            continue
        gaps = [facts.latencies(step)[who][1] for step in range(len(facts)) if who in facts.latencies(step)]
        first = seconds(gaps[0]) if facts.timed else counted(int(gaps[0]), "step")
        assert near(rows["first token"], f"after {first}, in step {tokens[0].step}")
        each = sorted(g for g in (facts.latencies(t.step - facts.records[0].step)[who][1] for t in tokens[1:]) if g > 0)
        pace = f", one every {seconds(median(each))} (median)" if facts.timed and each else ""
        over = [record for record in facts.records if who in (*record.finished, *record.aborted)]
        end = (facts.end_of(who, over[0]) or "aborted") if over else ""
        reply = f"{counted(len(tokens), 'token')}{'' if over else ' so far'}{pace}{f'; {end}' if over else ''}"
        assert near(rows["reply"], reply)


@pytest.mark.parametrize("name", RUNS)
def test_the_way_of_a_request_in_a_part(way_page, name):
    """A request that was computed before the part waits for nothing there, also if it is preempted throughout."""
    trace = run(name)[0]
    rng = random.Random(f"way {name}")
    for _ in range(4):
        begin = rng.randrange(1, len(trace))
        part = trace[begin : rng.randrange(begin, len(trace)) + 1]
        way_page.open(part)
        early = {chunk.request_id for record in trace[:begin] for chunk in record.chunks}
        here = {chunk.request_id for record in part for chunk in record.chunks}
        for index, who in enumerate(part.requests):
            rows = dict(tuple(row) for row in way(way_page, index))
            wait = {} if who in early else {"waited"} if who in here else {"waits"}
            assert {"waited", "waits"} & rows.keys() == set(wait), (begin, who, rows)
            assert ("prompt" in rows) == (who in here and who not in early)


def prompt_words(facts, who, done, tokens):
    until = tokens[0].step - facts.records[0].step if tokens else len(facts)
    pieces = [(facts.records[step].step, chunk) for step, chunk in done if step <= until]
    first, info = pieces[0][1], facts.trace.requests[who]
    words = counted(info.num_prompt_tokens, "token")
    if first.num_cached_tokens:
        words += f", {grouped(first.num_cached_tokens)} of them found in the prefix cache; the rest"
    if len(pieces) == 1:
        words += f" in one piece, in step {pieces[0][0]}"
    elif len(pieces) <= 3:
        words += f" in {len(pieces)} pieces: "
        words += ", ".join(f"{grouped(chunk.num_tokens)} in step {step}" for step, chunk in pieces)
    else:
        words += f" in {len(pieces)} pieces, step {pieces[0][0]} to step {pieces[-1][0]}"
    words += f" (the first {limit(first)})" if len(pieces) > 1 else ""
    rest = info.num_prompt_tokens - end_of(pieces[-1][1])
    return words + (f"; {grouped(rest)} still to come" if rest > 0 else "")


# -- the phases of a step, and the card at the end ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timed 3", "timed 2", "plain 1"])
def test_phases(drawn, name):
    page, facts, _ = drawn(name)
    early = 0
    for step in range(len(facts)):
        page.seek(step)
        page("page.frame()")
        record = facts.records[step]
        bars = page(
            "view.controls.phases.element.hidden ? [] : view.controls.phases.element.children.map((bar) => "
            "[bar.textContent, bar.getAttribute('title'), bar.getAttribute('style')])"
        )
        phases, end = [], 0.0
        for what, took in record.timings.items():
            begin = record.phase_starts.get(what, max(end, 0.0))
            end = begin + took
            phases.append((what, begin, took))
        assert len(bars) == len(phases) * facts.timed
        if not bars:
            continue
        low, high = min(begin for _, begin, _ in phases), max(begin + took for _, begin, took in phases)
        lanes = []
        for (words, title, style), (what, begin, took) in zip(bars, sorted(phases, key=lambda phase: phase[1])):
            assert near(words, f"{what} {seconds(took)}")
            early += begin < 0
            where = f"{seconds(-begin)} before" if begin < 0 else f"{seconds(begin)} into"
            assert near(title, f"{what} {seconds(took)}, from {where} the step") or abs(begin) < 1e-7
            lane, left, wide = (float(part.split(":")[1]) for part in style.split(";"))
            assert left == pytest.approx((begin - low) / (high - low), abs=1e-4)
            assert wide == pytest.approx(took / (high - low), abs=1e-4)
            taken = [other for other in lanes if other[0] == lane and other[1] > begin + 1e-4 * (high - low)]
            free = [
                n for n in range(int(lane))
                if not any(other[0] == n and other[1] > begin + 1.1e-4 * (high - low) for other in lanes)
            ]  # fmt: skip
            assert not taken and not free
            lanes.append((lane, begin + took))
        lanes_said = page("view.controls.phases.element.style['--wb-lanes']")
        assert int(lanes_said) == 1 + max(int(lane) for lane, _ in lanes)
    assert bool(early) == facts.timed


@pytest.mark.parametrize("name", [*RUNS, "idle 0"])
def test_the_card_at_the_end(drawn, name):
    page, facts, _ = drawn(name, status={"live": True, "state": "idle", "can": ["fork"]})
    prompt = sum(info.num_prompt_tokens for info in facts.trace.requests.values())
    tokens = sum(len(tokens) for tokens in facts[-1].tokens.values())
    expected = f"{counted(len(facts.order), 'request')}, {counted(prompt, 'prompt token')} and "
    expected += f"{counted(tokens, 'output token')} in {counted(len(facts), 'step')}"
    if facts.timed:
        records = facts.records
        pauses = [b.time - a.end for a, b in zip(records, records[1:]) if b.time - a.end > 0.5]  # noqa: RUF007
        took = records[-1].end - records[0].time - sum(pauses)
        firsts = sorted(
            value for step in range(len(facts)) for is_first, value in facts.latencies(step).values() if is_first
        )
        idle = f" without {seconds(sum(pauses))} idle" if pauses else ""
        expected += f" and {seconds(took)}{idle}; first token after {seconds(median(firsts))} (median)"
        expected += f"; {float(f'{tokens / took:.3g}'):g} output tokens per second"
    page("page.frame()")
    assert near(page("view.endCard.totals.textContent"), f"{expected}.")
    assert not page("view.endCard.element.hidden")
    budget = facts.trace.meta.config["max_num_batched_tokens"]
    assert page("view.endCard.budget.textContent") == f"Try a budget of {max(1, min(32, budget // 2))}"


@pytest.mark.parametrize(
    ("ids", "labels"),
    [
        (["a", "request-10"], ["a", "request-10"]),
        (["chatcmpl-abcdef-1", "chatcmpl-abcdef-22"], ["…1", "…22"]),
        (["chatcmpl-abcdef-1"], ["chatc…ef-1"]),
        (["chatcmpl-abcdef-1", "chatcmpl-abcdef-2", "chatcmpl-xyz-3"], ["…abcdef-1", "…abcdef-2", "…xyz-3"]),
        (["chatcmpl-abcdef-1", "chatcmpl-abcdef-2", "other"], ["chatc…ef-1", "chatc…ef-2", "other"]),
        (["run/one.long:request_number.5", "run/one.long:request_number.66"], ["…5", "…66"]),
        (["long-name-0123456789-x", "long-name-abcdefghij-y"], ["01234…89-x", "abcde…ij-y"]),
    ],
)
def test_labels_leave_out_what_all_ids_share(deno_page, ids, labels):
    requests = [{"id": name, "prompt": {"len": 4}, "max_tokens": 2, "arrival_step": n} for n, name in enumerate(ids)]
    deno_page.open(simulate({"requests": requests}))
    assert deno_page("view.store.requests.map((request) => request.label)") == labels
    marks = Marks(deno_page.painted("gantt")["marks"])
    assert [words for _, _, words in marks.texts(x=76)] == labels
