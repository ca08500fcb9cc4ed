"""The dashboard in a real browser: live, scrubbed, driven by keys, and with text nobody should trust."""

import json

import msgspec
import pytest
from viz_traces import HOSTILE_TEXTS, ReplayingController, hostile_trace, random_trace, workload

from workbench import Trace, simulate
from workbench.trace.records import KernelLaunch
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packed_batch import readable_scale
from workbench.viz.layout.pool import pool_columns


@pytest.fixture(scope="module")
def long_trace():
    return simulate(workload(3, num_requests=40, max_num_batched_tokens=24, max_num_seqs=8), max_steps=260)


@pytest.fixture
def page_of(open_page, tmp_path):
    """Open a trace as a single-file page."""

    def page_of_(trace, **options):
        trace.to_html(tmp_path / "trace.html")
        page = open_page(f"file://{tmp_path}/trace.html", **options)
        page.wait(f"view.store.numSteps === {len(trace)}")
        return page

    return page_of_


def test_the_last_frame_is_the_last_step_of_a_live_run(open_page, serve, long_trace):
    assert len(long_trace) >= 200
    controller = ReplayingController(long_trace, seconds_per_step=0.004)
    page = open_page(serve(controller))
    page.root.get_by_role("button", name="Run the engine").click()
    page.wait("view.status.state === 'running'")
    page.wait(f"view.store.numSteps === {len(long_trace)}", timeout=30_000)
    page.wait("view.status.state === 'idle'")
    page.frame()
    last = long_trace[-1]
    assert page.view("view.cursor.step") == last.step
    drawn = page.view("view.store.chunks(view.cursor.step).map((c) => [c.request.id, c.start, c.n])")
    assert drawn == [[chunk.request_id, chunk.start, chunk.num_tokens] for chunk in last.chunks]
    assert page.view("view.panels.find((p) => p.id === 'packed').total") == last.num_tokens


@pytest.mark.parametrize("part", [slice(None), slice(100, 160)], ids=["whole", "slice"])
def test_the_browser_holds_every_number_of_the_trace(page_of, long_trace, part):
    trace = long_trace[part]
    page = page_of(trace)
    steps = page.view(
        """Array.from({ length: view.store.numSteps }, (_, step) => ({
            chunks: view.store.chunks(step).map((c) =>
                [c.request.id, c.start, c.n, c.arm, c.limitedBy, c.sampled, c.q0]),
            tables: view.store.chunks(step).map((c) => view.store.blockTable(c.request, step)),
            states: view.store.requests.map((r) => view.store.stateOf(r, step)),
            pool: [...view.store.pool.at(step).state],
            references: [...view.store.pool.at(step).references],
            events: view.store.events(step).map((e) => [e.kind, e.request.id, e.reason]),
            why: view.store.requests
                .filter((r) => ["waiting", "preempted"].includes(view.store.stateOf(r, step)))
                .map((r) => [r.id, view.store.whyNot(r, step)]),
        }))"""
    )
    requests = list(trace.requests)
    for index, (record, drawn) in enumerate(zip(trace, steps)):
        bounds = record.cu_seqlens_q
        assert drawn["chunks"] == [
            [
                c.request_id,
                c.start,
                c.num_tokens,
                c.arm,
                c.limited_by,
                -1 if c.sampled is None else c.sampled,
                bounds[i],
            ]
            for i, c in enumerate(record.chunks)
        ]
        assert drawn["tables"] == [record.block_table(i) for i in range(len(record.chunks))]
        pool = trace.pool_state(index)
        assert drawn["pool"] == pool.state.tolist() and drawn["references"] == pool.ref_count.tolist()
        assert drawn["events"] == [[e.kind, e.request_id, e.reason] for e in record.events]
        assert dict(drawn["why"]) == record.not_scheduled
        running = {requests[i] for i, state in enumerate(drawn["states"]) if state == "running"}
        assert running == set(record.running) - set(record.finished)


def test_stepping_back_gives_the_same_pool_as_stepping_on(page_of):
    requests = [{"id": f"r{i}", "prompt": {"len": 9}, "max_tokens": 190, "arrival_step": 60 * i} for i in range(10)]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 160, "max_num_seqs": 4}, "requests": requests})
    assert len(trace) > 520, "several keyframes of the browser's history"
    page = page_of(trace)
    assert (
        page.view(
            """(() => {
            const snapshot = (step) => {
                const pool = view.store.pool.at(step);
                return JSON.stringify([...pool.owner, ...pool.state, ...pool.references]);
            };
            const forward = Array.from({ length: view.store.numSteps }, (_, step) => snapshot(step));
            const visits = [520, 3, 256, 255, 257, 0, 400, 511, 512, 513, 90];
            return visits.find((step) => snapshot(step) !== forward[step]) ?? -1;
        })()"""
        )
        == -1
    )


def test_browser_and_python_agree_on_the_readable_scale(page_of):
    import random

    page = page_of(random_trace(1))
    rng = random.Random(5)
    for _ in range(30):
        sizes = [rng.choice((1, 1, 3, 40, 700)) for _ in range(rng.randint(1, 60))]
        width, least = rng.uniform(50, 900), rng.uniform(0, 30)
        expected = [[s.x0, s.x1, s.broken] for s in readable_scale(sizes, width, least)]
        drawn = page.view(
            "view.geometry.readableScale(...argument).map((s) => [s.x0, s.x1, s.broken])", [sizes, width, least]
        )
        for ours, theirs in zip(expected, drawn, strict=True):
            assert ours == pytest.approx(theirs)
        assert page.view("view.geometry.poolColumns(argument)", sum(sizes)) == pool_columns(sum(sizes))


def test_tiles_are_classified_as_the_mask_says(page_of):
    page = page_of(random_trace(1))
    wrong = page.view(
        """(() => {
            const seen = (q, k, window) => k <= q && (window <= 0 || k > q - window);
            for (const window of [0, 3, 7]) for (let q0 = 0; q0 < 12; q0 += 3) for (let q1 = q0 + 1; q1 < q0 + 6; q1++)
              for (let k0 = 0; k0 < 16; k0 += 2) for (let k1 = k0 + 1; k1 < k0 + 5; k1++) {
                let cells = 0, some = 0;
                for (let q = q0; q < q1; q++) for (let k = k0; k < k1; k++) { cells++; some += seen(q, k, window); }
                const kind = some === 0 ? "skipped" : some === cells ? "full" : "diagonal";
                if (view.geometry.tileKind(q0, q1, k0, k1, window) !== kind) return [q0, q1, k0, k1, window, kind];
              }
            return null;
        })()"""
    )
    assert wrong is None


def test_keys(page_of, long_trace):
    page = page_of(long_trace)
    page.root.focus()
    press = page.page.keyboard.press

    def at():
        return page.view("view.cursor.step")

    press("Home")
    assert at() == 0
    press("ArrowRight")
    press("Shift+ArrowRight")
    assert at() == 11
    press("ArrowLeft")
    assert at() == 10
    press("End")
    assert at() == len(long_trace) - 1
    press("p")
    event_steps = [record.step for record in long_trace if record.events]
    assert at() == max(step for step in event_steps if step < len(long_trace) - 1)
    press("Home")
    press("n")
    assert at() == min(step for step in event_steps if step > 0)
    width = page.view("view.cursor.range[1] - view.cursor.range[0]")
    press("]")
    assert page.view("view.cursor.range[1] - view.cursor.range[0]") < width
    press("0")
    assert page.view("view.cursor.range[1] - view.cursor.range[0]") == width
    press("?")
    assert page.root.get_by_role("dialog", name="Keys").is_visible()
    press("Escape")
    assert page.root.get_by_role("dialog", name="Keys").is_hidden()
    press("/")
    page.page.keyboard.type("r12")
    assert page.view("view.cursor.filter") == "r12"
    page.frame()
    assert page.view("view.panels.find((p) => p.id === 'gantt').rows.map((r) => r.id)") == ["r12"]


def test_play_moves_on_and_space_stops_it(page_of, long_trace):
    page = page_of(long_trace)
    page.root.focus()
    page.page.keyboard.press("Home")
    page.view("void (view.cursor.speed = 60)")
    page.page.keyboard.press("Space")
    page.wait("view.cursor.step > 5")
    page.page.keyboard.press("Space")
    stopped = page.view("view.cursor.step")
    page.page.wait_for_timeout(150)
    assert page.view("view.cursor.step") == stopped


def test_looking_back_while_the_engine_goes_on(open_page, serve, long_trace):
    controller = ReplayingController(long_trace, seconds_per_step=0.01)
    page = open_page(serve(controller))
    controller.start()
    page.wait("view.store.numSteps > 20")
    page.root.focus()
    page.page.keyboard.press("Home")
    page.wait("view.store.numSteps > 60")
    assert page.view("view.cursor.step") == 0
    assert page.root.locator(".wb-position").text_content().startswith("viewing 0, engine at ")
    page.page.keyboard.press("Escape")
    page.wait("view.cursor.step > 60 && view.cursor.step === view.store.numSteps - 1")
    controller.pause()


def test_hovering_a_block_lights_its_owner_everywhere(page_of, long_trace):
    page = page_of(long_trace, height=2600)
    step = next(record.step for record in long_trace if len(record.chunks) >= 4)
    page.view("view.cursor.seek(argument)", step)
    page.frame()
    record = long_trace[step]
    block = record.block_table(2)[0]
    x, y = page.view("view.panels.find((p) => p.id === 'pool').xy(argument).map((v) => v + 3)", block)
    page.root.locator("[data-panel=pool] canvas").first.hover(position={"x": x, "y": y})
    hover = page.view("view.cursor.hover")
    owner = long_trace.pool_state(step).owners(block)[0]
    assert hover["block"] == block and list(long_trace.requests)[hover["request"]] == owner
    assert hover["kv"] == [0, long_trace.block_size]
    assert owner in page.root.get_by_role("tooltip").text_content()
    page.frame()
    assert (
        page.view(
            """['packed', 'tables', 'kernel', 'gantt'].filter((id) => {
            const canvas = view.panels.find((p) => p.id === id).overlay;
            const { width, height } = canvas;
            return !width || canvas.getContext("2d").getImageData(0, 0, width, height).data.every((v) => v === 0);
        })"""
        )
        == []
    ), "a panel shows nothing of the hover"


def test_clicking_a_sequence_shows_its_rectangle(page_of, long_trace):
    page = page_of(long_trace)
    step = next(r.step for r in long_trace if r.num_prefill_tokens > 4 and len(r.chunks) > 2)
    page.view("view.cursor.seek(argument)", step)
    page.frame()
    index = next(i for i, chunk in enumerate(long_trace[step].chunks) if not chunk.is_decode)
    chunk = long_trace[step].chunks[index]
    packed = "view.panels.find((p) => p.id === 'packed')"
    page.root.locator("[data-panel=packed] canvas").first.click(
        position={"x": 120, "y": page.view(f"{packed}.rowY({index}) + 4")}
    )
    page.frame()
    rectangle = "view.panels.find((p) => p.id === 'rectangle')"
    assert page.view(f"{rectangle}.mode") == "one"
    assert page.view(f"{rectangle}.shape") == [chunk.num_tokens, chunk.end]


def test_every_panel_has_a_name_a_focus_and_a_table(page_of, long_trace):
    page = page_of(long_trace, height=2600)
    page.view("view.cursor.seek(60)")
    page.root.focus()
    page.page.keyboard.press("t")
    page.page.wait_for_timeout(100)
    for panel in page.root.locator("section.wb-panel:not([hidden])").all():
        assert panel.get_attribute("aria-label")
        assert panel.locator(".wb-twin").is_visible() and panel.locator(".wb-twin").get_attribute("tabindex") == "0"
        assert panel.locator(".wb-twin th").count() >= 1
    packed = page.root.locator("[data-panel=packed] .wb-twin tbody tr")
    assert packed.count() == len(long_trace[60].chunks)
    page.page.keyboard.press("t")
    for canvas in page.root.locator("canvas[role=img]").all():
        assert canvas.get_attribute("aria-label") and canvas.get_attribute("tabindex") == "0"
    assert page.root.locator("[aria-live=polite]").count() == 1


def test_the_threadgroups_of_a_shadow_launch(page_of):
    """One row per threadgroup with the blocks it read; hovering a block lights the threadgroups that read it."""
    trace = random_trace(3)
    step = next(r.step for r in trace if len(r.chunks) == 3 and r.num_prefill_tokens > 8)
    record, size = trace[step], trace.block_size
    tables = [record.block_table(i) for i in range(3)]
    twice = [(i, chunk, head) for i, chunk in enumerate(record.chunks) for head in (0, 1)]
    blocks = [[[i, head, 0], tables[i][: -(-c.end // size)]] for i, c, head in twice]
    items = [[i, record.cu_seqlens_q[i], c.num_tokens, 0, c.end, 0, 1] for i, c in enumerate(record.chunks)]
    launch = {"threadgroups": 6, "buffers": {}, "kv_blocks": blocks, "kv_bytes": [64 * c.end for _, c, _ in twice]}
    shadow = {"layer": 2, "faults": [], "max_difference": 2e-7, "block_q": 64}
    details = {"shadow": {**shadow, "work_items": items, "launches": [launch]}}
    kernel = KernelLaunch("cpu", num_heads=2, num_kv_heads=2, head_dim=8, dtype="float32", details=details)
    traced = msgspec.structs.replace(record, kernel=kernel)
    traced.attach_block_tables(size, tables)
    replayed = Trace(trace.meta)
    for info in trace.requests.values():
        replayed.add_request(info)
    for original in trace:
        replayed.append(traced if original is record else original)
    page = page_of(replayed, height=2600)
    page.view("view.cursor.seek(argument)", step)
    page.frame()
    panel = page.root.locator("[data-panel=kernel]")
    words = panel.locator(".wb-facts").text_content()
    assert "6 threadgroups for 3 work items" in words and "on layer 2 beside the step (shadow launch)" in words
    assert "difference from the engine's own attention 2.0e-7" in words
    kernel_panel = "view.panels.find((p) => p.id === 'kernel')"
    spans = page.view(f"{kernel_panel}.rows.map((row) => {kernel_panel}.spans(row))")
    whole = [[[k, min(k + size, c.end)] for k in range(0, c.end, size)] for _, c, _ in twice]
    assert spans == whole
    panel.get_by_role("button", name="Table").click()
    page.frame()
    cells = panel.locator(".wb-twin tbody tr").nth(3).locator("td").all_text_contents()
    assert cells[0] == "(1, 1, 0)" and cells[-2:] == [" ".join(map(str, blocks[3][1])), str(64 * record.chunks[1].end)]
    panel.get_by_role("button", name="Table").click()
    panel.get_by_label("Rows", exact=True).select_option("work items")
    page.frame()
    planned = sum(-(-chunk.num_tokens // 32) for chunk in record.chunks)
    assert page.view(f"{kernel_panel}.rows.length") == planned


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_themes_draw_on_their_background(page_of, dark):
    page = page_of(random_trace(1), dark=dark)
    assert page.root.get_attribute("data-theme") == ("dark" if dark else "light")
    background = page.root.evaluate("(root) => getComputedStyle(root).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
    page.root.get_by_role("button", name="Light or dark").click()
    assert page.root.get_attribute("data-theme") == ("light" if dark else "dark")


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=["script", "end-tags", "bidi", "long-word", "entities"])
def test_untrusted_text_is_shown_as_text(page_of, text):
    trace = hostile_trace([text] * 5)
    page = page_of(trace)
    page.view("view.cursor.toLive()")
    page.frame()
    page.root.focus()
    page.page.keyboard.press("t")
    page.page.keyboard.press("t")
    page.frame()
    assert page.page.evaluate("window.pwned") is None
    output = page.root.locator(".wb-output").first.text_content()
    assert output == (text * 5).replace("\x00", "\ufffd") or output == text * 5
    assert page.root.locator("script, img, textarea:not([aria-label=Prompt])").count() == 0
    assert page.root.evaluate("(root) => root.scrollWidth <= root.clientWidth"), "a long word widens the page"


def test_the_form_adds_a_request_and_shows_a_refusal(open_page, serve):
    controller = ReplayingController(random_trace(1))
    page = open_page(serve(controller))
    page.root.get_by_role("button", name="Queue another request").click()
    page.root.get_by_role("textbox", name="Prompt").fill("Once upon")
    page.root.get_by_role("button", name="Add", exact=True).click()
    page.page.wait_for_timeout(400)
    assert controller.added[0][0] == "Once upon" and controller.added[0][1]["max_tokens"] == 48
    page.root.get_by_role("textbox", name="Prompt").fill("")
    page.root.get_by_role("button", name="Add", exact=True).click()
    page.wait("view.status.message === 'prompt must not be empty'")
    assert page.root.get_by_role("alert").is_visible()


def test_step_and_pause_buttons(open_page, serve, long_trace):
    controller = ReplayingController(long_trace, seconds_per_step=0.02)
    page = open_page(serve(controller))
    page.root.get_by_role("button", name="Let the engine take one step").click()
    page.wait("view.store.numSteps === 1")
    page.root.get_by_role("button", name="Run the engine").click()
    page.wait("view.store.numSteps > 5")
    page.root.get_by_role("button", name="Pause the engine after").click()
    page.wait("view.status.state === 'paused'")
    assert len(controller.trace) < len(long_trace)


def test_two_sessions_see_the_same_run(open_page, serve, long_trace):
    controller = ReplayingController(long_trace, seconds_per_step=0.005)
    address = serve(controller)
    first = open_page(address)
    controller.start()
    second = open_page(address)
    for page in (first, second):
        page.wait(f"view.store.numSteps === {len(long_trace)}", timeout=30_000)
        assert page.view("view.store.requests.map((r) => r.tokens.length)") == [
            sum(c.request_id == request_id and c.sampled is not None for r in long_trace for c in r.chunks)
            for request_id in long_trace.requests
        ]


def test_a_packet_may_come_twice_and_may_be_missed(page_of, long_trace):
    """The store takes overlapping packets once and refuses one after a gap."""
    import base64

    from workbench.viz.layout.packet import encode_packet, trace_facts

    page = page_of(random_trace(1))
    columns = columns_of(long_trace)

    def packet(first, last, facts=False):
        extra = {"facts": trace_facts(long_trace)} if facts else None
        return base64.b64encode(encode_packet(columns, first, last, extra=extra)).decode()

    packets = [
        packet(0, 50, True),
        packet(30, 90),
        packet(30, 60),
        packet(120, 130),
        packet(90, 200),
        packet(0, len(long_trace)),
    ]
    taken = page.view(
        """(() => {
            const store = new view.store.constructor();
            const answers = argument.map((text) => {
                const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
                return [store.append(new DataView(bytes.buffer)), store.numSteps];
            });
            const sums = Array.from({ length: store.numSteps }, (_, step) => store.chunks(step).at(-1).q1);
            const texts = store.requests.map((r) => r.tokens.map((t) => t.id));
            return { answers, sums, texts };
        })()""",
        packets,
    )
    assert taken["answers"] == [[True, 50], [True, 90], [True, 90], [False, 90], [True, 200], [True, len(long_trace)]]
    assert taken["sums"] == [record.num_tokens for record in long_trace]
    assert json.dumps(taken["texts"]) == json.dumps(
        [
            [c.sampled for r in long_trace for c in r.chunks if c.request_id == request_id and c.sampled is not None]
            for request_id in long_trace.requests
        ]
    )


def test_a_breakpoint_is_set_hit_and_removed_in_the_page(open_page, serve, long_trace):
    controller = ReplayingController(long_trace, seconds_per_step=0.002)
    page = open_page(serve(controller))
    page.root.get_by_role("button", name="Pause the engine on a condition").click()
    dialog = page.root.get_by_role("dialog", name="Pause the engine when")
    dialog.get_by_label("Condition").select_option("block")
    dialog.get_by_label("block", exact=True).fill("60")
    dialog.get_by_role("button", name="Set").click()
    page.wait("view.status.breakpoints.length === 1")
    page.root.get_by_role("button", name="Run the engine").click()
    page.wait("view.status.state === 'paused'")
    stop = next(r.step for r in long_trace if any(60 in c.new_block_ids for c in r.chunks))
    page.wait(f"view.store.numSteps === {stop + 1}")
    page.frame()
    assert "block 60 is taken" in page.root.locator(".wb-title .wb-badge").text_content()
    dialog.get_by_role("button", name="Remove").click()
    page.wait("view.status.breakpoints.length === 0")


def test_two_runs_are_shown_side_by_side(open_page, tmp_path, long_trace):
    from workbench.trace.compare import compare
    from workbench.viz.export_html import to_html

    other = simulate(workload(3, num_requests=40, max_num_batched_tokens=64, max_num_seqs=8), max_steps=260)
    to_html(long_trace, tmp_path / "two.html", other=other)
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other && view.other.numSteps > 0")
    panel = page.root.locator("[data-panel=compare]")
    found = compare(long_trace, other)
    panel.get_by_role("button", name="Go to the first divergence").click()
    assert page.view("view.cursor.step") == found.first_divergence.step
    assert panel.locator(".wb-badge").text_content() == found.badge
    assert panel.locator(".wb-scroll tbody tr").count() == len(found.requests)
    for alignment in ("arrival", "time", "step"):
        panel.get_by_label("Align the two runs by").select_option(alignment)
        page.frame()


def test_the_first_different_token_is_marked(open_page, tmp_path):
    """Token by token: b samples another token once."""
    from workbench.viz.export_html import to_html

    trace = random_trace(3)
    made = [(r.step, i, c) for r in trace for i, c in enumerate(r.chunks) if c.sampled is not None]
    step, index, changed = made[len(made) // 2]
    other = Trace(trace.meta)
    for info in trace.requests.values():
        other.add_request(info)
    for record in trace:
        chunks = list(record.chunks)
        if record.step == step:
            chunks[index] = msgspec.structs.replace(changed, sampled=changed.sampled + 1)
        copy = msgspec.structs.replace(record, chunks=tuple(chunks))
        copy.attach_block_tables(trace.block_size, [record.block_table(i) for i in range(len(chunks))])
        other.append(copy)
    nth = sum(c.request_id == changed.request_id for s, _, c in made if s < step)
    to_html(trace, tmp_path / "two.html", other=other)
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other && view.other.numSteps > 0")
    panel = page.root.locator("[data-panel=compare]")
    panel.get_by_label("Rows of the requests").select_option("tokens")
    page.frame()
    compare_panel = "view.panels.find((p) => p.id === 'compare')"
    found = page.view(f"{compare_panel}.rows.map(([a], row) => [a.id, {compare_panel}.tokens.differences[row]])")
    assert dict(found) == {request: nth if request == changed.request_id else -1 for request in trace.requests}
    row = [request for request, _ in found].index(changed.request_id)
    x, y = page.view(
        f"[{compare_panel}.tokens.x(argument[1] + 0.5, {compare_panel}.width), {compare_panel}.middle(argument[0])]",
        [row, nth],
    )
    panel.locator("canvas").first.hover(position={"x": x, "y": y})
    words = page.root.get_by_role("tooltip").text_content()
    assert "the first difference" in words
    assert f"(id {changed.sampled})" in words and f"(id {changed.sampled + 1})" in words
    panel.locator("canvas").first.click(position={"x": x, "y": y})
    assert page.view("view.cursor.step") == step
    panel.get_by_role("button", name="Table").click()
    page.frame()
    cells = panel.locator(".wb-twin tbody tr").nth(row).locator("td").all_text_contents()
    assert (cells[0], cells[-1]) == (changed.request_id, str(nth))


def test_runs_of_other_workloads_are_refused(open_page, tmp_path, long_trace):
    from workbench.viz.export_html import to_html

    to_html(long_trace, tmp_path / "two.html", other=random_trace(1))
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other")
    page.frame()
    assert "different requests" in page.root.locator("[data-panel=compare] .wb-facts").text_content()


@pytest.mark.parametrize("range_mode", ["fit", "window"])
def test_a_picture_that_grew_is_the_picture_drawn_at_once(open_page, serve, long_trace, range_mode):
    """While the axis stands still only new steps are drawn; the pixels are those of a whole drawing."""
    controller = ReplayingController(long_trace)
    for _ in range(130):
        controller.step()
    page = open_page(serve(controller), height=1900)
    page.wait("view.store.numSteps === 130")
    if range_mode == "window":
        page.view("view.cursor.zoom(0.4)")
        page.view("view.cursor.toLive()")
    grown = "view.panels.filter((panel) => panel.drawNew)"
    page.view(
        f"""{grown}.forEach((panel) => {{
            panel.times = 0;
            const drawNew = panel.drawNew;
            panel.drawNew = (axis) => {{ panel.times++; drawNew.call(panel, axis); }};
        }})"""
    )
    ranges = set()
    for step in range(131, 161):
        controller.step()
        page.wait(f"view.store.numSteps === {step}")
        page.frame()
        ranges.add(tuple(page.view("view.cursor.range")))
        different = (
            page.view(
                f"""{grown}.filter((panel) => {{
                const pixels = () => panel.canvas.toDataURL();
                const drawn = pixels(), times = panel.times;
                panel.picture = null;
                panel.stale.add("data");
                panel.frame();
                return drawn !== pixels();
            }}).map((panel) => panel.id)"""
            )
            if step % 5 == 0
            else []
        )
        assert different == []
    assert 1 < len(ranges) < 12, "the axis moves now and then, and not with every step"
    times = page.view(f"{grown}.map((panel) => [panel.id, panel.times])")
    assert all(count > 8 for _, count in times), times
