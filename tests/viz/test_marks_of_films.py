"""The scenes of a step explained: every mark is a fact of the record, and the sentences count them."""

import re

import pytest
from painted import counted, grouped
from runs_to_draw import RUNS, run, steps_of
from test_parts_of_recordings import forgotten

FILMED = [*RUNS, "many 5", "crowd 0"]


def scenes_at(page, step):
    page("view.cursor.seek(argument)", step)
    page("view.film.show()")
    return {scene["name"]: scene for scene in page("view.film.scenes")}


@pytest.fixture
def filmed(drawn):
    """A function that opens a run and gives the scenes of its steps, each with the facts before and after it."""

    def filmed_(name):
        page, facts, _ = drawn(name)
        for step in steps_of(facts):
            yield facts, step, facts.records[step], scenes_at(page, step)

    return filmed_


@pytest.mark.parametrize("name", FILMED)
def test_schedule(filmed, name):
    for facts, step, record, scenes in filmed(name):
        scene, row = scenes["schedule"], 0
        assert scene["budget"] == record.token_budget
        for bar, chunk in zip(scene["bars"], record.chunks, strict=True):
            assert facts.order[bar["request"]] == chunk.request_id
            assert (bar["from"], bar["to"]) == (row, row + chunk.num_tokens)
            assert bar["decode"] == (chunk.arm == "decode")
            row += chunk.num_tokens
        scheduled = {chunk.request_id for chunk in record.chunks}
        waiting = [who for who in facts.order if facts[step].states.get(who) in ("waiting", "preempted")]
        left = {facts.order[wait["request"]]: wait["why"] for wait in scene["waits"]}
        assert list(left) == [who for who in waiting if who not in scheduled]
        for who, why in left.items():
            reason = record.passed_over.get(who, record.waiting_reason)
            assert why == (reason.sentence if hasattr(reason, "sentence") else str(reason or ""))


def places_of(facts, step, chunk, group):
    """The places of a chunk's block table in a group: the block, whether it is new, and whether it was found cached."""
    record, size = facts.records[step], facts.groups[group].block_size
    is_new = not step or chunk.request_id in record.resumed or chunk.request_id not in facts[step - 1].tables
    before = [] if is_new else facts[step - 1].tables[chunk.request_id][group]
    for at, block in enumerate(facts[step].tables[chunk.request_id][group]):
        fresh = bool(block) and (at >= len(before) or before[at] != block)
        yield block, fresh, fresh and (at + 1) * size <= chunk.num_cached_tokens


def check_blocks(scene, facts, step, order):
    """Check the scene of a step, of a page whose requests have an order."""
    record, groups = facts.records[step], range(len(facts.groups))
    for row, chunk in zip(scene["rows"], record.chunks, strict=True):
        assert order[row["request"]] == chunk.request_id
        places = [(place["block"], place["fresh"], place["found"]) for place in row["places"]]
        assert places == list(places_of(facts, step, chunk, facts.shown_group)), (step, chunk.request_id)
    places = [place for chunk in record.chunks for group in groups for place in places_of(facts, step, chunk, group)]
    found = sum(hit for _, _, hit in places)
    taken, words = sum(fresh for _, fresh, _ in places) - found, scene["sentence"]
    assert f"{counted(taken, 'block')} taken for new tokens" in words
    assert (f"{counted(found, 'block')} found in the prefix cache" in words) == (found > 0)
    assert f"{grouped(record.free_blocks)} of {grouped(facts.num_blocks - 1)} are free." in words
    assert ("Preempted: " in words) == bool(record.preempted)
    for who in record.preempted[:3]:
        held = sum(bool(block) for table in facts[step - 1].tables[who] for block in table)
        assert f"{who if len(who) <= 20 else who[:19] + chr(8230)} its {counted(held, 'block')}" in words


@pytest.mark.parametrize("name", FILMED)
def test_blocks(filmed, name):
    for facts, step, _, scenes in filmed(name):
        check_blocks(scenes["blocks"], facts, step, facts.order)


@pytest.mark.parametrize("name", FILMED)
def test_blocks_in_the_first_steps_of_a_part(deno_page, name):
    trace, facts = run(name)
    lost = [record.step for record in trace if record.preempted and record.step]
    for at in sorted({*lost[:3], *steps_of(facts, 4)} - {0}):
        for part in (trace[at:], forgotten(trace, at)):
            deno_page.open(part)
            for step in range(at, min(at + 2, len(trace))):
                check_blocks(scenes_at(deno_page, step - at)["blocks"], facts, step, list(part.requests))


@pytest.mark.parametrize("name", FILMED)
def test_mask(filmed, name):
    for facts, _, record, scenes in filmed(name):
        scene, window = scenes["mask"], facts.window_of(record)
        assert scene["window"] == window
        assert scene["rows"] == record.num_tokens
        starts = [chunk.start - chunk.ahead for chunk in record.chunks]  # rejected drafts leave no KV
        assert scene["columns"] == sum(starts) + record.num_tokens
        row = 0
        for band, chunk, start in zip(scene["bands"], record.chunks, starts, strict=True):
            assert facts.order[band["request"]] == chunk.request_id
            assert (band["q0"], band["q1"]) == (row, row + chunk.num_tokens)
            assert (band["start"], band["end"]) == (start, start + chunk.num_tokens)
            row += chunk.num_tokens
        assert f"{counted(row, 'query row')} of {counted(len(record.chunks), 'request')} stand" in scene["sentence"]
        assert (f"and at most the last {grouped(window)}" in scene["sentence"]) == (window > 0)
        several = f"Of {len(facts.groups)} KV cache groups this is group {facts.shown_group}: "
        assert (several in scene["sentence"]) == (len(facts.groups) > 1)


@pytest.mark.parametrize("name", FILMED)
def test_attention(filmed, name):
    for facts, _, record, scenes in filmed(name):
        scene = scenes["attention"]
        if record.kernel is None or not record.kernel.work_items:
            assert ("planned" in scene["sentence"]) and sum(
                item["rows"] for item in scene["items"]
            ) == record.num_tokens
            row = {chunk.request_id: chunk.start - chunk.ahead for chunk in record.chunks}
            window = facts.window_of(record)
            for item in scene["items"]:
                first = row[facts.order[item["request"]]]
                assert item["from"] == (max(0, first - window + 1) if window else 0)
                row[facts.order[item["request"]]] = item["to"]
            continue
        items = record.kernel.work_items
        expected = [(record.chunks[item.seq].request_id, item.num_rows, item.kv_start, item.kv_end) for item in items]
        shown = [(facts.order[i["request"]], i["rows"], i["from"], i["to"]) for i in scene["items"]]
        assert shown == expected
        read = sum(item.kv_end - item.kv_start for item in items)
        assert scene["sentence"].startswith(f"{counted(len(items), 'work item')} read {counted(read, 'KV position')} ")


@pytest.mark.parametrize("name", FILMED)
def test_sample(filmed, name):
    total = 0
    for facts, step, record, scenes in filmed(name):
        scene, num = scenes["sample"], 0
        for row, chunk in zip(scene["rows"], record.chunks, strict=True):
            assert facts.order[row["request"]] == chunk.request_id
            given = [token for token in facts[step].tokens[chunk.request_id] if token.step == record.step]
            assert len(row["tokens"]) == len(given) == (chunk.sampled is not None) * (1 + len(chunk.sampled_before))
            for words, token in zip(row["tokens"], given, strict=True):
                assert words in (token.text, f"⟨token {token.id}⟩", "⟨end of text⟩")
            num += len(given)
        assert scene["sentence"].startswith(f"{counted(num, 'token')} {'is' if num == 1 else 'are'} sampled.")
        drafts, accepted = (sum(len(c.drafts) for c in record.chunks), sum(c.num_accepted for c in record.chunks))
        told = f" Of {counted(drafts, 'draft')}, {accepted} {'is' if accepted == 1 else 'are'} accepted."
        assert (told in scene["sentence"]) if drafts else (" accepted" not in scene["sentence"])
        total += num
    assert total


def test_the_painter_paints_the_scene_and_says_it_in_words(drawn):
    page, facts, _ = drawn("timed 3")
    for step in steps_of(facts, 4):
        scenes_at(page, step)
        for at, (_name, title) in enumerate(page("view.film.scenes.map((s) => [s.name, s.title])")):
            page("(view.film.time = argument * 4 + 3.9, view.film.draw())", at)
            label = page("view.film.canvas.attributes['aria-label']")
            assert label.startswith(f"{title}. ")
            sentence = page(f"view.film.scenes[{at}].sentence")
            assert page("view.film.sentence.textContent") == sentence
            for records in (False, True):  # the sentence stands beside the picture, and in the picture of a film
                words = painted_words(page, at, records)
                assert (sentence.split()[0] in words and sentence.split()[-1] in words) == records
                assert page("view.film.sentence.className").endswith("wb-announce") == records
            page("view.film.recorder = null")


@pytest.mark.parametrize("width", [960, 390])
@pytest.mark.parametrize("name", [*FILMED, "big 1"])
def test_every_request_of_a_step_is_named_or_counted(drawn, name, width):
    """In the first scene in its bar or below it, in the fourth as one of ten rows."""
    page, facts, _ = drawn(name)
    page("Object.defineProperty(view.film.canvas, 'clientWidth', { value: argument })", width)
    for step in steps_of(facts):
        scenes, record = scenes_at(page, step), facts.records[step]
        waits = {facts.order[wait["request"]] for wait in scenes["schedule"]["waits"]}
        sizes = {chunk.request_id: grouped(chunk.num_tokens) for chunk in record.chunks}
        words = [each for each, _ in written(page, 0)]
        pairs = [each.partition(": ")[::2] for each in words]
        assert all(number in ("", sizes[who]) for who, number in pairs if who in sizes)
        more = numbers_of("and {} more", words)
        assert all(number > 1 for number in more), "one more takes no less room than its name"
        named = (set(sizes) | waits) & {who for who, _ in pairs}
        assert len(named) + sum(more) == len(sizes) + len(waits), (step, words)
        rows, told = len(scenes["attention"]["items"]), [each for each, _ in written(page, 3)]
        drawn_rows = 9 if rows > 10 else rows
        assert len(numbers_of("{} row", told) + numbers_of("{} rows", told)) == drawn_rows
        assert numbers_of("and {} more", told) == [rows - drawn_rows] * (rows > 10)


def numbers_of(form, words):
    """The numbers in those words that have a form."""
    found = [re.fullmatch(form.format(r"([\d,]+)"), each) for each in words]
    return [int(each[1].replace(",", "")) for each in found if each]


def painted_words(page, at, records):
    """All words that the painter writes below the title and above the picture."""
    page("view.film.recorder = argument ? { stop() {} } : null", records)
    return " ".join(words for words, y in written(page, at) if 60 < y < 130).split()


def written(page, at):
    """All words of a scene whose marks have appeared, each with its height."""
    return page(
        """(() => {
      const context = view.film.canvas.getContext("2d"), write = context.fillText, written = [];
      context.fillText = (words, x, y) => written.push([words, y]);
      view.film.time = 4 * argument + 3.9;
      view.film.draw();
      context.fillText = write;
      return written;
    })()""",
        at,
    )


def test_the_sentence_of_a_step_stands_once(drawn):
    """While the film is open, its first scene has the sentence that is in the bars otherwise."""
    page, _, _ = drawn("timed 3")
    for open_ in (True, False):
        page("argument ? view.film.show() : view.film.close()", open_)
        page("(view.film.playing = false, view.draw())")
        assert page("view.controls.sentence.hidden") == open_


def test_the_film_follows_the_cursor_and_closes(drawn):
    page, facts, _ = drawn("plain 1")
    scenes_at(page, 3)
    page("view.film.playing = false")
    page("view.cursor.seek(5)")
    page("view.draw()")
    assert page("view.film.step") == 5
    page("view.film.close()")
    page("view.cursor.seek(6)")
    page("view.draw()")
    assert page("view.film.step") == 5 and page("view.film.element.hidden")
    assert run("plain 1")[1] is facts
