"""Drafts in a real browser: cells of chunks and of the packed batch, tokens of the texts, and the sampling panel."""

import re

import numpy as np
import pytest

from workbench import Engine, EngineConfig, SamplingParams, simulate


@pytest.fixture(scope="module")
def trace():
    """Two requests whose verifications accept 2, 0 and 3 of 3 drafts in turn, and 0 of 3."""
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 4, "num_blocks": 64}
    requests = [
        {"id": "lucky", "prompt": {"len": 5}, "max_tokens": 24, "accepts": [2, 0, 3]},
        {"id": "unlucky", "prompt": {"len": 9}, "max_tokens": 24, "accepts": [0]},
    ]
    return simulate({"config": config | {"num_speculative_tokens": 3, "spec_method": "ngram"}, "requests": requests})


FILLED = """(([panel, rectangles]) => {
    const canvas = view.panel(panel).canvas, { width: across, height: down } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, across, down);
    return rectangles.map((rectangle) => {
      const [x, y, width, height] = rectangle.map((v) => Math.round(v * devicePixelRatio)), pixels = new Map();
      for (let row = y; row < y + height; row++) for (let column = x; column < x + width; column++) {
        const at = 4 * (row * across + column), colour = data.slice(at, at + 4).join();
        pixels.set(colour, (pixels.get(colour) || 0) + 1);
      }
      return Math.max(...pixels.values()) / (width * height);
    });
})(argument)"""
"""The share of each rectangle that its most frequent colour takes."""


def test_accepted_drafts_are_filled_and_rejected_ones_crossed_out(page_of, trace):
    page = page_of(trace, height=1600)
    record = next(record for record in trace if record.chunks[0].num_accepted == 2)
    page.view("view.cursor.seek(argument)", record.step)
    page.frame()
    assert page.view("view.store.hasDrafts")
    segments = page.view("view.panel('packed').readable.map((s) => [s.x0, s.x1])")
    cells = []
    for chunk, (x0, x1) in zip(record.chunks, segments, strict=True):
        left, cell = 84 + x0 + 2, (x1 - x0 - 1 - 4) / chunk.num_tokens
        for row in range(chunk.num_tokens):
            # The inside of a cell of the readable ribbon, 6 pixels high.
            cells.append([left + row * cell + 1, 62 + 20 - 8 + 1, cell - 3, 4])
    filled = [share > 0.98 for share in page.view(FILLED, ["packed", cells])]
    assert filled == [True, True, True, False, True, False, False, False]
    lines = page.view("view.panel('packed').hit(90, 70).lines")
    assert "2 of 3 drafts accepted" in lines
    rows = page.view("view.panel('packed').tableData().rows")
    assert [row[-2] for row in rows] == ["2 of 3", "0 of 3"]


def test_texts_say_which_tokens_were_drafts(page_of, trace):
    page = page_of(trace, height=1600)
    page.view("view.cursor.seek(view.store.numSteps - 1)")
    page.frame()
    for index, name in enumerate(trace.requests):
        expected = []
        for record in trace:
            for chunk in record.chunks:
                if chunk.request_id == name and chunk.sampled is not None:
                    expected += [True] * len(chunk.sampled_before) + [False]
        assert page.view("view.store.requests[argument].tokens.map((t) => Boolean(t.drafted))", index) == expected
        spans = page.root.locator(f"[data-panel=texts] [data-request='{index}'] .wb-output span")
        assert [span.get_attribute("data-drafted") == "true" for span in spans.all()] == expected
        assert any(expected) is (name == "lucky")


def test_step_into_shows_the_probabilities_of_drafts(open_page, serve, tiny_llama):
    options = {"method": "draft_model", "num_layers": 1, "draft_sample_method": "probabilistic"}
    config = EngineConfig(num_blocks=64, block_size=4, num_speculative_tokens=2, speculative=options, seed=3)
    with Engine(tiny_llama, config) as engine:
        engine.add_request([5, 9, 17], SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True), request_id="r")
        while not engine.drafts:
            engine.step()
        page = open_page(serve(engine))
        page.wait(f"view.store.numSteps === {len(engine.trace)}")
        names = []
        while not names or names[-1] != "sample":
            before = page.view("JSON.stringify(view.status.phase || null)")
            page.root.focus()
            page.page.keyboard.press("i")
            page.wait(f"JSON.stringify(view.status.phase || null) !== {before!r}")
            names.append(page.view("view.status.phase && view.status.phase.name"))
            if names[-1] == "forward":
                logits = np.array(engine.phase[1], dtype=np.float64)
        page.frame()
        (drafts,) = engine.drafts.values()
        (_, sampled) = engine.phase
        rows = page.view("view.status.phase.drafts")
        items = page.root.get_by_role("region", name="Step into").locator(".wb-drafts li").all_text_contents()
        assert len(rows) == len(items) == len(drafts.token_ids) == len(logits) - 1
        for index, (row, draft) in enumerate(zip(rows, drafts.token_ids, strict=True)):
            target = np.exp(logits[index] - logits[index].max())
            target = target[draft] / target.sum()
            assert row["id"] == draft
            assert row["probability"] == pytest.approx(target)
            assert row["draft_probability"] == pytest.approx(drafts.probabilities[index][draft])
            shown = re.search(r"model ([\d.]+)%, draft model ([\d.]+)%(.*)", items[index])
            assert float(shown[1]) == pytest.approx(100 * target, abs=0.06)
            verified = index < len(sampled)
            accepted = verified and sampled[index].token_id == draft
            assert shown[3] == (": accepted" if accepted else ": rejected" if verified else "")
