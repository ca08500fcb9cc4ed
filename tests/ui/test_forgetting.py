"""The page of a server whose engine forgets its oldest steps."""

import random

import pytest

from workbench import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.ui


def test_a_view_follows_a_trace_that_forgets(open_page, serve, tiny_llama):
    """After each change of the trace the page holds the steps that are left, under their own numbers."""
    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=4, block_size=4, num_blocks=32, max_model_len=64)
    draw = random.Random(5)
    engine = Engine(tiny_llama, config, keep_steps=60)
    try:

        def take(steps):
            while engine.scheduler.step < steps:
                prompt = [draw.randrange(3, 120) for _ in range(draw.randint(1, 20))]
                engine.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
                engine.step()

        take(20)
        page = open_page(serve(lambda: engine.trace), height=2600)
        page.wait("view.store.numSteps === 20")
        assert page.view("view.cursor.step") == 19, "the page of a server follows its newest step"
        running = "view.store.chunks(view.cursor.step).map(({ request: r }) => [r.id, view.theme.hue(r.index)])"
        hues = {}
        for steps in (*range(95, 130, 3), 130):  # it forgets between two of them
            take(steps)
            page.wait(f"view.store.numSteps && view.store.label(view.store.numSteps - 1) === {steps - 1}")
            page.frame()
            now = dict(page.view(running))
            assert all(now.values()) and len(set(now.values())) == len(now), "four run, of six hues"
            assert {each: now[each] for each in now.keys() & hues.keys()} == {
                each: hues[each] for each in now.keys() & hues.keys()
            }, "no hue changes while its request runs"
            hues = now
            first, last = engine.trace[0].step, engine.trace[-1]
            assert first > 0 and page.view("view.store.label(0)") == first
            assert page.view("view.store.label(view.cursor.step)") == last.step
            drawn = page.view("view.store.chunks(view.cursor.step).map((c) => [c.request.id, c.start, c.n])")
            assert drawn == [[chunk.request_id, chunk.start, chunk.num_tokens] for chunk in last.chunks]
            tables = page.view(
                "view.store.chunks(view.cursor.step).map((c) => view.store.blockTable(c.request, view.cursor.step))"
            )
            assert tables == list(last.block_tables.values())
            pool = page.view("[...view.store.pool.at(view.cursor.step).state]")
            assert pool == engine.trace.pool_state(-1).state.tolist()
            assert page.view("view.store.requests.length") == len(engine.trace.requests)
            named = page.view(
                """[...root.querySelectorAll(".wb-card")].map((card) =>
                    [card.querySelector("header bdi").textContent, view.store.requests[card.dataset.request].id])"""
            )
            assert named and all(shown == request for shown, request in named)
        page.view("view.cursor.seek(view.cursor.step - 10)")
        looked_at = page.view("view.store.label(view.cursor.step)")
        take(160)
        page.wait("view.store.label(view.store.numSteps - 1) === 159")
        assert page.view("view.store.label(view.cursor.step)") == max(looked_at, engine.trace[0].step)
    finally:
        engine.close()
