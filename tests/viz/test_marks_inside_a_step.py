"""A step taken phase by phase: the box of its phases and the attention weights, against the step's record and tensors.

Rows, tokens and blocks are compared with the record that the step leaves; norms, weights and probabilities with the
tensors, computed here once more in float64.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from painted import LIGHT, Marks, grouped, mixed

from workbench import Engine, EngineConfig, simulate
from workbench.viz.attention_weights import weights_facts
from workbench.viz.feed import Feed

PROMPTS = {"long": list(range(5, 40)), "short": [40, 41, 42], "late": list(range(60, 72))}
TEXT = "element.querySelectorAll('{}').map((each) => each.textContent)"


@pytest.fixture(scope="module")
def inside(tiny_llama, deno_page):
    """A function that takes the phases of a step; gives (name, result, what the page shows) of each, and the record."""
    config = EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=64)
    engines = []

    def inside_(at=1):
        engine = Engine(tiny_llama, config)
        engines.append(engine)
        feed = Feed(engine)
        for name, prompt in PROMPTS.items():
            engine.add_request(prompt, request_id=name, max_tokens=6, ignore_eos=True)
        for _ in range(at):
            engine.step()
        seen = []
        while isinstance(phase := engine.step_into(), tuple):
            seen.append((*phase, feed.status()))
        record = engine.trace[-1]
        return engine, record, seen

    yield inside_
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module", params=[0, 1, 3])
def taken(request, inside):
    return inside(request.param)


def shown(page, engine, status):
    """The box of phases, as the page has it."""
    page.open(engine.trace, status=status)
    page("view.phaseBox.update(view.status)")


def softmax(row):
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def known_tokens(engine, who):
    """The prompt of a request and its output so far."""
    output = (
        token
        for record in engine.trace
        for chunk in record.chunks
        if chunk.request_id == who
        for token in chunk.accepted
    )
    return [*PROMPTS[who], *output]


def cu_seqlens(record):
    return np.cumsum([0, *(chunk.num_tokens for chunk in record.chunks)]).tolist()


def spans(record):
    return {chunk.request_id: (chunk.start, chunk.start + chunk.num_tokens) for chunk in record.chunks}


def listed(page, part):
    """The names and texts of a list of facts."""
    names, values = (page(f"((element) => {TEXT.format(tag)})(view.phaseBox.{part})") for tag in ("dt", "dd"))
    return list(zip(names, values, strict=True))


def test_the_track_has_every_phase_and_marks_those_done(taken, deno_page):
    engine, record, seen = taken
    names = ["schedule", "prepare", "layer 0", "layer 1", "forward", "sample"]
    assert [name for name, _, _ in seen] == names
    for index, (name, _, status) in enumerate(seen):
        shown(deno_page, engine, status)
        cells = deno_page(
            "view.phaseBox.track.children.map((cell) => [cell.attributes.title, cell.attributes['data-done'] ?? null,"
            " cell.attributes['aria-current'] ?? null])"
        )
        expected = [[each, "true" if i <= index else None, "step" if i == index else None]
                    for i, each in enumerate([*names, "record"])]  # fmt: skip
        assert cells == expected
        title = deno_page("view.phaseBox.title.textContent")
        layer = f"layer {name.split()[1]} of 2" if name.startswith("layer") else name
        assert title == f"Inside step {record.step}: {layer}"
        below = deno_page("view.phaseBox.below.textContent")
        assert below == f"The panels below show steps that are complete, the last of them is step {record.step}."
    deno_page.open(engine.trace, status={"live": True, "phase": None})
    deno_page("view.phaseBox.update(view.status)")
    assert deno_page("view.phaseBox.element.hidden")


def test_the_schedule_and_the_batch_are_those_of_the_record(taken, deno_page):
    engine, record, seen = taken
    before = {name: list(table) for name, table in (engine.trace[-2].block_tables.items() if record.step else ())}
    shown(deno_page, engine, seen[0][2])
    facts = listed(deno_page, "facts")
    assert [name for name, _ in facts] == [chunk.request_id for chunk in record.chunks]
    for name, words in facts:
        assert tuple(map(int, re.search(r"\[(\d+), (\d+)\)", words).groups())) == spans(record)[name]
        (start, end), length = spans(record)[name], len(PROMPTS[name])
        part = "last chunk" if start and end == length else "whole prompt" if end == length else "part of a prompt"
        limit = "not limited" if end >= length else "limited by token budget"
        assert f"), {'decode' if start >= length else part}, {limit}" in words
        held = before.get(name, [])
        new = record.block_tables[name][len(held) :]
        num_hits = record.chunk(name).num_cached_tokens // 4
        for blocks, title in ((new[:num_hits], "blocks found in the prefix cache"), (new[num_hits:], "new blocks")):
            found = re.search(rf"{title} ([\d ]+)", words)
            assert (found[1].split() if found else []) == [str(block) for block in blocks]
    shown(deno_page, engine, seen[1][2])
    numbers = {name: re.sub(r"^.*?\]: ", "", words).split() for name, words in listed(deno_page, "facts")}
    tokens = {name: known_tokens(engine, name) for name in PROMPTS}
    rows = [(name, position) for name, (start, end) in spans(record).items() for position in range(start, end)]
    assert numbers["positions"] == [str(position) for _, position in rows]
    assert numbers["token_ids"] == [str(tokens[name][position]) for name, position in rows]
    tables = record.block_tables
    slots = [tables[name][position // 4] * 4 + position % 4 for name, position in rows]
    assert numbers["slot_mapping"] == [str(slot) for slot in slots]
    assert numbers["cu_seqlens_q"] == [str(end) for end in cu_seqlens(record)]
    assert numbers["seqused_k"] == [str(end) for _, end in spans(record).values()]


def test_a_layer_draws_the_norms_of_every_head_and_row(taken, deno_page):
    engine, record, seen = taken
    bounds = cu_seqlens(record)
    for name, layer, status in seen[2:4]:
        shown(deno_page, engine, status)
        pictures = deno_page("view.phaseBox.pictures.children.map((figure) => figure.textContent)")
        for index, array in enumerate(("q", "out", "k", "v")):
            order = list(status["phase"]["norms"])
            tensor = np.asarray(getattr(layer, order[index]), np.float64)
            norms = np.sqrt((tensor**2).sum(axis=-1))
            words = pictures[index]
            assert words.startswith(order[index]) and f"[{norms.shape[0]}, {norms.shape[1]}, " in words
            low, high = norms.min(), norms.max()
            assert f"{low:.3g} to {high:.3g}, mean {norms.mean():.3g}" in words
            canvas = f"view.phaseBox.pictures.children[{index}].querySelectorAll('canvas')[0]"
            label = deno_page(f"{canvas}.attributes['aria-label']")
            assert f"{norms.shape[1]} heads in {norms.shape[0]} packed rows" in label
            marks = Marks(deno_page(f"{canvas}.getContext('2d').marks"))
            wide = deno_page(f"parseFloat({canvas}.attributes.style.slice(6))")
            cells = [rect for rect in marks.rects(height=6)]
            assert len(cells) == norms.size == record.num_tokens * norms.shape[1]
            for head, row in [(h, r) for h in range(norms.shape[1]) for r in range(norms.shape[0])]:
                colour, x, y, width, _ = cells[head * norms.shape[0] + row]
                cell = wide / norms.shape[0]
                assert (x, y) == (pytest.approx(row * cell), 7 * head)
                assert width == pytest.approx(max(1, cell - (cell > 4)))
                share = round(255 * (norms[row, head] - low) / (high - low)) / 255
                wanted = mixed(LIGHT.hairline, LIGHT.text, share)
                assert distance(colour, wanted) <= 2, (name, array, head, row)
            starts = [x for _, x, _, w, _ in marks.rects(colour=LIGHT.muted) if w == 1]
            assert starts == [pytest.approx(begin / record.num_tokens * wide) for begin in bounds[:-1]]
            ids = [chunk.request_id for chunk in record.chunks]
            assert [words for _, _, words in marks.texts()] == [
                who for i, who in enumerate(ids) if not hidden(ids, bounds, wide, i, record.num_tokens)
            ]


def hidden(ids, bounds, wide, index, num_rows):
    """Whether the name of a sequence has no room: it begins before the end of the last name that is written."""
    end = float("-inf")
    for i in range(index + 1):
        x = bounds[i] / num_rows * wide
        if x <= end:
            if i == index:
                return True
            continue
        end = x + 14 + 6 * len(ids[i])
    return False


def distance(one, other):
    return max(abs(int(one[i : i + 2], 16) - int(other[i : i + 2], 16)) for i in (1, 3, 5))


def attention_of(layer, row):
    """Softmax of the products of a row's queries and its context's keys, up to its position, [heads, context]."""
    seq = next(i for i in range(len(layer.request_ids)) if layer.cu_seqlens_q[i] <= row < layer.cu_seqlens_q[i + 1])
    keys = np.asarray(layer.keys[seq], np.float64)
    query = np.asarray(layer.q[row], np.float64)
    position = len(keys) - layer.cu_seqlens_q[seq + 1] + row
    weights = np.zeros((len(query), len(keys)))
    for head in range(len(query)):
        products = keys[: position + 1, head * keys.shape[1] // len(query)] @ query[head] * layer.softmax_scale
        weights[head, : position + 1] = softmax(products)
    return weights, layer.request_ids[seq], position


def test_a_token_that_the_trace_does_not_have_is_blank():
    """A trace of lengths alone has no prompt; a tokenizer would refuse the number."""
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 3}, "max_tokens": 2}]})
    unknown = trace[:0]
    layer = SimpleNamespace(layer=0, step=0, request_ids=["a"], cu_seqlens_q=[0, 3], seqused_k=[3])
    layer.weights = lambda row: np.full((1, 3), 1 / 3)
    decoded = []
    facts = weights_facts(layer, 2, unknown, lambda tokens: decoded.append(tokens) or "w")
    assert facts["tokens"] == ["", "", ""] and decoded == []


def test_attention_weights_are_those_of_the_row(taken, deno_page):
    engine, record, seen = taken
    bounds, feed = cu_seqlens(record), Feed(engine)
    layer = seen[3][1]
    feed._visible.show_layer(layer)
    for row in sorted({0, bounds[1] - 1, bounds[-1] - 1, bounds[-1] // 2}):
        feed.handle({"name": "show_weights", "args": {"row": row}})
        shown(deno_page, engine, feed.status() | {"phase": None})
        weights, who, position = attention_of(layer, row)
        chunk = record.chunk(who)
        begin = bounds[[each.request_id for each in record.chunks].index(who)]
        assert position == chunk.start + row - begin
        known = known_tokens(engine, who)[: chunk.start + chunk.num_tokens]
        texts = [engine.tokenizer.decode([token]) for token in known]
        options = deno_page("view.panel('weights').row.options.map((o) => [o.attributes.value, o.textContent])")
        ends = [
            [str(end - 1), f"{each.request_id}, last row ({end - 1})"] for each, end in zip(record.chunks, bounds[1:])
        ]
        assert options == [["", "row"], *ends]
        heads = deno_page("view.panel('weights').head.options.map((o) => [o.attributes.value, o.textContent])")
        assert heads == [["", "mean of all heads"], *([str(head), f"head {head}"] for head in range(len(weights)))]
        for head in ("", "0", str(len(weights) - 1)):
            deno_page("(view.panel('weights').head.value = argument, view.panel('weights').redraw())", head)
            deno_page("view.panel('weights').render()")
            values = weights.mean(axis=0) if head == "" else weights[int(head)]
            drawn = deno_page(
                "view.panel('weights').text.children.map((span) => [span.textContent, span.attributes.style,"
                " span.attributes.title])"
            )
            assert [text for text, _, _ in drawn] == texts
            most, error = values.max(), weights.max() / 255
            for at, (_, style, title) in enumerate(drawn):
                said = re.fullmatch(r"position (\d+): ([\d.]+)", title)
                assert int(said[1]) == at and float(said[2]) == pytest.approx(values[at], abs=error)
                shade = re.match(r"background:(#\w+)", style)[1]
                share = np.sqrt(min(1, float(said[2]) / most)) * 0.85
                assert distance(shade, mixed(LIGHT.background, LIGHT.text, share)) <= 6
            summary = deno_page("view.panel('weights').summary.textContent")
            assert summary.startswith(f"{who}, position {grouped(position)}: layer 1 of step {record.step}, row {row}.")
            assert float(re.search(r"weight ([\d.]+)\.$", summary)[1]) == pytest.approx(most, abs=error + 0.0005)
            table = deno_page.table("weights")
            assert table["caption"] == f"Row {row} of {who}"
            assert [(int(at), text) for at, text, _ in table["rows"]] == list(enumerate(texts))
            assert [float(value) for *_, value in table["rows"]] == pytest.approx(values.tolist(), abs=error)


def test_a_captured_layer_is_named_before_a_row_is_chosen(taken, deno_page):
    engine, record, seen = taken
    told, last = "view.panel('weights').summary.textContent", cu_seqlens(record)[1] - 1
    for name, layer, status in seen[2:4]:
        shown(deno_page, engine, status)
        deno_page("view.panel('weights').render()")
        said = f"layer {name.split()[1]} of step {record.step}, row {last}."
        assert said in deno_page(told) and deno_page("view.panel('weights').row.value") == str(last)
        feed = Feed(engine)
        assert "weights" not in feed.status()
        shown(deno_page, engine, feed.status())
        deno_page("view.panel('weights').render()")
        assert deno_page(told) == "Choose a layer. The next step keeps the inputs of its attention."
        assert deno_page("[view.panel('weights').row.hidden, view.panel('weights').forget.hidden]") == [True, True]
        feed._visible.show_layer(layer)
        shown(deno_page, engine, feed.status())
        deno_page("view.panel('weights').render()")
        assert deno_page(told) == f"Layer {layer.layer} of step {record.step} is captured. Choose a row."
        assert deno_page("[view.panel('weights').row.hidden, view.panel('weights').forget.hidden]") == [False, False]
        assert deno_page("view.panel('weights').text.hidden")
    waiting = {"capture": {"layer": 1, "step": -1, "sequences": []}, "weights": None}
    shown(deno_page, engine, feed.status() | waiting)
    deno_page("view.panel('weights').render()")
    assert deno_page(told) == "Layer 1 will be captured in the next step."
    assert deno_page("[view.panel('weights').row.hidden, view.panel('weights').head.hidden]") == [True, True]


def test_candidates_are_the_most_likely_tokens_and_samples_those_of_the_record(taken, deno_page):
    engine, record, seen = taken
    sampling = [chunk for chunk in record.chunks if chunk.sampled is not None]
    _, logits, status = seen[4]
    shown(deno_page, engine, status)
    figures = deno_page(
        "view.phaseBox.candidates.children.map((figure) => [figure.children[0].textContent,"
        " figure.querySelectorAll('li').map((bar) => [bar.attributes.title, bar.attributes.style, bar.textContent])])"
    )
    assert [who for who, _ in figures] == [chunk.request_id for chunk in sampling]
    for (_, bars), row, chunk in zip(figures, np.array(logits, np.float64), sampling):
        chances = softmax(row)
        best = np.argsort(-chances, kind="stable")[:5].tolist()
        assert [title for title, _, _ in bars] == [f"token {token}" for token in best] and best[0] == chunk.sampled
        for (_, style, words), token in zip(bars, best):
            assert f"--wb-share:{100 * chances[token]:.2f}%" in style
            assert float(re.search(r"([\d.]+)%", words)[1]) == pytest.approx(100 * chances[token], abs=0.051)
    shown(deno_page, engine, seen[5][2])
    facts = listed(deno_page, "facts")
    decoded = [engine.tokenizer.decode([chunk.sampled]) for chunk in sampling]
    expected = [(c.request_id, f"{text!r} (id {c.sampled})") for c, text in zip(sampling, decoded)]
    assert facts == (expected or [("none", "no sequence has reached its last known token")])


def test_drafts_are_told_with_their_probabilities_and_their_fate(tiny_llama, deno_page):
    """Accepted are those that the record's chunk has among its sampled tokens."""
    options = {"method": "draft_model", "num_layers": 1, "draft_sample_method": "probabilistic"}
    config = EngineConfig(num_blocks=64, block_size=4, num_speculative_tokens=2, speculative=options, seed=3)
    fates = set()
    with Engine(tiny_llama, config) as engine:
        feed = Feed(engine)
        for name in ("one", "other"):
            engine.add_request([5, 9, 17], request_id=name, max_tokens=40, temperature=1.0, ignore_eos=True)
        for _ in range(14):
            phases = {}
            while isinstance(phase := engine.step_into(layers=False), tuple):
                phases[phase[0]] = (phase[1], feed.status(), dict(engine.drafts))
            if phase is None:
                break
            record = engine.trace[-1]
            logits = iter(np.array(phases["forward"][0], np.float64))
            drafts = phases["schedule"][2]
            expected = {"forward": [], "sample": []}
            for chunk in record.chunks:
                if chunk.sampled is None:
                    continue
                rows = [next(logits) for _ in (*chunk.drafts, None)]
                for index, (draft, row) in enumerate(zip(chunk.drafts, rows)):
                    drawn = drafts[chunk.request_id].probabilities[index][draft]
                    accepted = index < len(chunk.sampled_before)
                    fate = ": accepted" if accepted else ": rejected" if index == len(chunk.sampled_before) else ""
                    fates.add(fate)
                    chances = 100 * softmax(row)[draft], 100 * float(drawn)
                    expected["forward"].append((chunk.request_id, draft, *chances, ""))
                    expected["sample"].append((chunk.request_id, draft, *chances, fate))
            for name in ("forward", "sample"):
                shown(deno_page, engine, phases[name][1])
                items = deno_page(
                    "view.phaseBox.drafts.children.map((item) => [item.textContent, item.attributes.title,"
                    " item.attributes['data-accepted'] ?? null])"
                )
                assert deno_page("view.phaseBox.drafts.hidden") == (not expected[name])
                cells = deno_page("view.phaseBox.track.children.map((cell) => cell.attributes.title)")
                assert cells[-2:] == ["draft", "record"]
                pattern = r'(\w+) draft ".*": model ([\d.]+)%, draft model ([\d.]+)%(.*)'
                for (words, title, mark), (who, draft, *chances, fate) in zip(items, expected[name], strict=True):
                    said = re.fullmatch(pattern, words)
                    assert (said[1], title, said[4]) == (who, f"token {draft}", fate)
                    assert [float(said[2]), float(said[3])] == pytest.approx(chances, abs=0.051)
                    assert mark == {": accepted": "true", ": rejected": "false", "": None}[fate]
    assert fates == {": accepted", ": rejected", ""}


def test_candidates_tell_what_the_sampling_parameters_made_of_them(tiny_llama, deno_page):
    config = EngineConfig(num_blocks=64, block_size=4, record_top_tokens=6, seed=1)
    with Engine(tiny_llama, config) as engine:
        feed = Feed(engine)
        engine.add_request([5, 9, 17], request_id="r", max_tokens=8, temperature=0.6, top_k=3, ignore_eos=True)
        ranks = set()
        for _ in range(8):
            phases = {}
            while isinstance(phase := engine.step_into(layers=False), tuple):
                phases[phase[0]] = (phase[1], feed.status())
            sampled = phase.chunks[0].sampled
            (row,) = np.array(phases["forward"][0], np.float64)
            model, order = softmax(row), np.argsort(-row, kind="stable").tolist()
            drawn = np.zeros(len(row))
            drawn[order[:3]] = softmax(row[order[:3]] / 0.6)
            shown(deno_page, engine, phases["sample"][1])
            (bars,) = deno_page(
                "view.phaseBox.candidates.children.map((figure) => figure.querySelectorAll('li').map((bar) =>"
                " [bar.attributes.title, bar.textContent, bar.attributes['data-sampled'] ?? null,"
                " bar.attributes['data-removed'] ?? null]))"
            )
            assert [title for title, *_ in bars] == [f"token {token}" for token in order[:6]]
            for rank, (token, (_, words, is_sampled, is_removed)) in enumerate(zip(order, bars)):
                text = engine.tokenizer.decode([token])
                said = re.fullmatch(r'"(.*)" ([\d.]+)%( sampled)?(.*)', words)
                assert said[1] == text and float(said[2]) == pytest.approx(100 * model[token], abs=0.051)
                assert bool(said[3]) == (token == sampled) == (is_sampled == "true")
                assert (is_removed == "true") == (rank >= 3)
                if rank >= 3:
                    assert said[4] == " removed by top k"
                else:
                    share = re.fullmatch(r" drawn with ([\d.]+)%", said[4])
                    assert float(share[1]) == pytest.approx(100 * drawn[token], abs=0.051)
            ranks.add(order.index(sampled))
        assert len(ranks) > 1, "with a temperature, not always the most likely token"


def test_blocks_of_a_hit_are_not_called_new(tiny_llama):
    with Engine(tiny_llama, EngineConfig(max_num_batched_tokens=64, block_size=4, num_blocks=64)) as engine:
        feed, prompt = Feed(engine), list(range(5, 23))
        engine.add_request(prompt, request_id="first", max_tokens=4, ignore_eos=True)
        engine.step()
        engine.add_request([*prompt, 40, 41], request_id="second", max_tokens=4, ignore_eos=True)
        engine.step_into()
        words = dict(feed.status()["phase"]["facts"])["second"]
        table = engine.scheduler.requests["second"].block_table
        shared = engine.scheduler.requests["first"].block_table[:4]
        assert list(table[:4]) == list(shared) and len(table) == 5
        assert f"blocks found in the prefix cache {' '.join(map(str, table[:4]))}, new blocks {table[4]}" in words
