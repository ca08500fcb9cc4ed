"""Single panels in a real browser: what they draw, light up and compare."""

from base64 import b64decode

import msgspec
import pytest
from viz_traces import ReplayingController, random_trace, requests_in_time, workload

from workbench import Trace, simulate
from workbench.trace import KernelLaunch, Supplement
from workbench.trace.clock import time_of_day
from workbench.viz.export_html import to_html
from workbench.viz.layout.packed_batch import readable_scale
from workbench.viz.layout.pool import pool_columns


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
    kernel = KernelLaunch("cpu", num_heads=2, num_kv_heads=2, head_dim=8, dtype="float32")
    traced = msgspec.structs.replace(record, kernel=kernel)
    traced.attach_block_tables(size, tables)
    replayed = Trace(trace.meta)
    for info in trace.requests.values():
        replayed.add_request(info)
    for original in trace:
        replayed.append(traced if original is record else original)
    replayed.add_supplement(Supplement(step, "shadow", {**shadow, "work_items": items, "launches": [launch]}))
    page = page_of(replayed, height=2600)
    page.view("view.cursor.seek(argument)", step)
    page.frame()
    panel = page.root.locator("[data-panel=kernel]")
    words = panel.locator(".wb-facts").text_content()
    assert "6 threadgroups for 3 work items" in words and "shadow launch of the Metal kernel on layer 2" in words
    assert "differs from the engine's attention by at most 2.0e-7" in words
    kernel_panel = "view.panels.find((p) => p.id === 'kernel')"
    spans = page.view(f"{kernel_panel}.rows.map((row) => {kernel_panel}.spans(row))")
    whole = [[[k, min(k + size, c.end)] for k in range(0, c.end, size)] for _, c, _ in twice]
    assert spans == whole
    panel.get_by_role("button", name="Table").click()
    page.frame()
    cells = panel.locator(".wb-table-view tbody tr").nth(3).locator("td").all_text_contents()
    assert cells[0] == "(1, 1, 0)" and cells[-2:] == [" ".join(map(str, blocks[3][1])), str(64 * record.chunks[1].end)]
    panel.get_by_role("button", name="Table").click()
    panel.get_by_label("Rows", exact=True).select_option("work items")
    page.frame()
    planned = sum(-(-chunk.num_tokens // 32) for chunk in record.chunks)
    assert page.view(f"{kernel_panel}.rows.length") == planned


def test_two_runs_are_shown_side_by_side(open_page, tmp_path, long_trace):
    from workbench.trace.readings.compare import compare
    from workbench.viz.export_html import to_html

    smaller = workload(3, num_requests=40, num_blocks=30, max_num_batched_tokens=24, max_num_seqs=8)
    other = simulate(smaller, max_steps=260)
    to_html(long_trace, tmp_path / "two.html", other=other)
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other && view.other.numSteps > 0")
    panel = page.root.locator("[data-panel=compare]")
    found = compare(long_trace, other)
    panel.get_by_role("button", name="Go to the first divergence").click()
    assert page.view("view.cursor.step") == found.first_divergence.step
    assert panel.locator(".wb-badge").text_content() == found.badge
    assert "Times are in steps" in panel.locator(".wb-facts").text_content()
    assert panel.locator(".wb-scroll tbody tr").count() == len(found.requests) + 1  # and their mean
    for alignment in ("arrival", "step"):
        panel.get_by_label("Align the two runs by").select_option(alignment)
        page.frame()


def test_rounding_is_no_change_in_the_table_of_two_runs(open_page, tmp_path):
    from workbench.viz.export_html import to_html

    to_html(requests_in_time(64), tmp_path / "two.html", other=requests_in_time(128))
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other && view.other.numSteps > 0")
    words = page.root.locator("[data-panel=compare] .wb-scroll").text_content()
    assert "-22 ms" in words.replace("−", "-") and "e-" not in words
    # A clock that was set may have tokens before arrivals, and a count is never rounded.
    cells = page.page.evaluate(
        """() => {
          const panel = document.querySelector('.wb-root').workbench.panel('compare');
          const rows = [['r', -1, -1 - 1e-12, 2, 2 + 1e-6, 2e9, 2e9 + 1]];
          Object.defineProperty(panel, 'findings', { value: { rows, mean: null, rounding: 1e-9 } });
          panel.fillGains();
          return [...panel.gainRows.querySelectorAll('td')].map((cell) => cell.textContent);
        }"""
    )
    assert cells[3] == "0" and cells[6].startswith("+") and cells[9] == "+1"


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
    cells = panel.locator(".wb-table-view tbody tr").nth(row).locator("td").all_text_contents()
    assert (cells[0], cells[-1]) == (changed.request_id, str(nth + 1))


def test_runs_of_other_workloads_are_refused(open_page, tmp_path, long_trace):
    from workbench.viz.export_html import to_html

    to_html(long_trace, tmp_path / "two.html", other=random_trace(1))
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other")
    page.frame()
    assert "different requests" in page.root.locator("[data-panel=compare] .wb-facts").text_content()


@pytest.mark.repeats(of="test_the_last_frame_is_the_last_step_of_a_live_run")
@pytest.mark.parametrize("range_mode", ["fit", "window", "time"])
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
    if range_mode == "time":
        page.view("(view.cursor.axis = 'time', view.changed('range'))")
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


@pytest.fixture
def hybrid_trace():
    groups = [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 12}, {"kind": "mamba"}]
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"parts": [{"len": 24, "seed": "s"}, {"len": 10 + 7 * i, "seed": f"u{i}"}]},
            "max_tokens": 24,
            "arrival_step": 2 * i,
        }
        for i in range(4)
    ]
    config = {"num_blocks": 97, "block_size": 4, "kv_cache_groups": groups, "max_num_batched_tokens": 48}
    return simulate({"config": config, "requests": requests})


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("first", [0, 9], ids=["whole", "slice"])
def test_the_browser_holds_the_block_tables_of_every_group(page_of, hybrid_trace, first):
    trace = hybrid_trace[first:]
    page = page_of(trace)
    drawn = page.view(
        """Array.from({ length: view.store.numSteps }, (_, step) => ({
            tables: view.store.chunks(step).map((c) =>
                view.store.groups.map((_, group) => view.store.blockTable(c.request, step, group))),
            held: view.store.blocksByGroup(step).held,
        }))"""
    )
    for index, (record, there) in enumerate(zip(trace, drawn, strict=True)):
        assert there["tables"] == [list(record.block_tables_by_group[chunk.request_id]) for chunk in record.chunks]
        state = trace.pool_state(index)
        held = [set() for _ in trace.kv_cache_groups]
        for request_id, table in state.block_tables.items():
            for group, blocks in enumerate((table, *state.other_tables[request_id])):
                held[group].update(blocks)
        assert there["held"] == [len(blocks - {0}) for blocks in held]


def test_a_block_names_its_group_and_a_hole_its_reason(page_of, hybrid_trace):
    page = page_of(hybrid_trace, height=2600)
    step = next(record.step for record in hybrid_trace if len(record.chunks) == 4)
    page.view("view.cursor.seek(argument)", step)
    page.frame()
    record = hybrid_trace[step]
    full, window, state = record.block_tables_by_group[record.chunks[1].request_id]
    for blocks, words in ((window, "window 12"), (state, "state")):
        lines = page.view(
            """(() => {
                const pool = view.panels.find((p) => p.id === "pool"), [x, y] = pool.xy(argument);
                return pool.hit(x + 2, y + 2).lines;
            })()""",
            blocks[-1],
        )
        assert any(words in line for line in lines), lines
    assert 0 in window and 0 not in full
    rows = page.view("view.panels.find((p) => p.id === 'tables').rows.map((row) => [row.chunk.request.id, row.blocks])")
    tables = [record.block_tables_by_group[chunk.request_id] for chunk in record.chunks]
    assert [blocks for _, blocks in rows] == [blocks for groups in tables for blocks in groups]
    hole = page.view("view.panels.find((p) => p.id === 'tables').hit(86, 20 + 18 * 4 + 4).lines")
    assert "behind the window" in hole[1]


def test_an_admission_shows_what_it_missed(page_of, hybrid_trace):
    page = page_of(hybrid_trace, height=2600)
    page.view("view.cursor.seek(argument)", len(hybrid_trace) - 1)
    page.frame()
    assert "not kept in the cache" in page.root.locator("[data-panel=events]").inner_text()
    lines = page.view(
        """(() => {
            const gantt = view.panels.find((p) => p.id === "gantt"), { store } = view;
            return gantt.chunkLines(store.chunkIn(store.byId.get("r1"), argument), argument);
        })()""",
        hybrid_trace.requests["r1"].arrival_step,
    )
    assert any("was computed by r0, and not kept" in line for line in lines)


def test_tokens_that_were_not_recorded_are_dots(open_page, tmp_path):
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 5}, "max_tokens": 3}]})
    trace.meta = msgspec.structs.replace(trace.meta, config={**trace.config, "token_ids_recorded": False})
    to_html(trace, tmp_path / "dots.html")
    page = open_page(f"file://{tmp_path}/dots.html")
    page.wait("view.store.numSteps === 3")
    page.view("view.cursor.seek(2)")
    page.frame()
    assert page.root.locator("[data-request='0'] .wb-output").text_content().split() == ["·"] * 3
    assert "its id is not recorded" in page.view("view.store.idWords(0)")


def test_panels_of_one_column_take_the_whole_width(open_page, tmp_path):
    to_html(random_trace(3), tmp_path / "pool.html")
    page = open_page(f"file://{tmp_path}/pool.html")
    chosen = ["pool", "tables"]
    page.view("view.areas.fill('all', (id) => argument.includes(id) ? view.panel(id).element : undefined)", chosen)
    page.frame()
    for name in chosen:
        assert page.root.locator(f"[data-panel={name}]").bounding_box()["width"] > 1200


def test_long_ids_are_told_apart_by_their_labels(open_page, tmp_path):
    ids = ["cmpl-bench-warm-0-0-abc67c65", *(f"cmpl-bench-5-{n}-0-b0c3745{n}" for n in range(2)), "cmpl-bench-late"]
    requests = [{"id": name, "prompt": {"len": 5}, "max_tokens": 2} for name in ids]
    to_html(simulate({"requests": requests}), tmp_path / "long.html")
    page = open_page(f"file://{tmp_path}/long.html")
    page.wait("view.store.requests.length === 4")
    labels = page.view("view.store.requests.map((request) => request.label)")
    assert labels == ["…warm-0-0", "…5-0-0", "…5-1-0", "…late"]


def test_the_phases_of_a_step_stand_at_their_places_in_its_time(page_of):
    trace = simulate(workload(1, num_requests=4))
    # The forward pass of step 1 begins before the step and overlaps its scheduling; sampling follows without a gap.
    begins, seconds = (
        {"schedule": 0.0, "forward": -0.01, "sample": 0.03},
        {"schedule": 0.02, "forward": 0.04, "sample": 0.01},
    )
    timed = Trace(trace.meta)
    for info in trace.requests.values():
        timed.add_request(info)
    for record in trace:
        phases = {"timings": seconds, "phase_starts": begins} if record.step == 1 else {}
        timed.append(msgspec.structs.replace(record, time=record.step, end=record.step + 0.5, **phases))
    page = page_of(timed)
    strip = "[...view.root.querySelectorAll('.wb-phases li')].map((bar) => bar.getBoundingClientRect().toJSON())"
    page.view("view.cursor.seek(argument)", 1)
    page.frame()
    bars = page.view(strip)
    labels = page.root.locator(".wb-phases li").all_inner_texts()
    assert labels == ["forward 40 ms", "schedule 20 ms", "sample 10 ms"], "in order of their beginnings"
    forward, schedule, sample = bars
    whole = (sample["right"] - forward["left"]) / 0.05
    for bar, begin, length in ((forward, 0.0, 0.04), (schedule, 0.01, 0.02), (sample, 0.04, 0.01)):
        assert bar["left"] - forward["left"] == pytest.approx(begin * whole, abs=2)
        assert bar["width"] == pytest.approx(length * whole, abs=2)
    assert forward["top"] == sample["top"] < schedule["top"], "only phases that overlap stand below each other"
    page.view("view.cursor.seek(argument)", 2)
    page.frame()
    assert not page.root.locator(".wb-phases").is_visible()


@pytest.mark.parametrize("dark", (False, True))
def test_a_saved_picture_has_the_step_the_cursor_and_the_legend(page_of, tmp_path, dark):
    """Also of a panel that is far below the window, and of one that shows its table, in both themes."""
    image = pytest.importorskip("PIL.Image")
    page = page_of(random_trace(1), width=620, height=400, dark=dark)

    def saved(panel):
        with page.page.expect_download() as download:
            page.page.locator(f"[data-panel={panel}]").get_by_role("button", name="PNG:").dispatch_event("click")
        download.value.save_as(tmp_path / "saved.png")
        return download.value.suggested_filename, image.open(tmp_path / "saved.png").convert("RGB")

    far_before = saved("pool")[1]
    before, timeline_before = page.view("view.cursor.step"), saved("timeline")[1]
    assert before != 5
    page.view("view.cursor.seek(5)")
    page.frame()
    name, far = saved("pool")
    assert name == "trace-kv-pool-step-5.png"
    assert not page.view("view.panel('pool').visible"), "the panel is out of sight"
    below_the_title = (0, 44, far.width, far.height)
    assert max(difference(far_before.crop(below_the_title), far.crop(below_the_title))) > 0
    assert far.getpixel((1, 1)) == image.new("RGB", (1, 1), page.view("view.theme.colours.background")).getpixel((0, 0))
    timeline = saved("timeline")[1]
    legend = page.view("view.panel('timeline').legend.element.height")
    assert legend > 0 and len(timeline.crop((8, 44, timeline.width, 44 + legend)).getcolors(9999)) > 5
    cursor = image.new("RGB", (1, 1), page.view("view.theme.colours.cursor")).getpixel((0, 0))
    assert dict(map(reversed, timeline.getcolors(1 << 20)))[cursor] > 20
    page.view("view.toggleTables()")
    page.frame()
    page.view("view.cursor.seek(argument)", before)
    page.frame()
    again = saved("timeline")[1]
    assert again.size == timeline_before.size and max(difference(again, timeline_before)) == 0
    assert not page.root.locator("[data-panel=timeline] .wb-body").is_visible(), "the table stays"


def test_a_panel_is_saved_and_copied_as_a_picture(page_of, tmp_path):
    image = pytest.importorskip("PIL.Image")
    page = page_of(random_trace(1))
    page.page.evaluate("() => { navigator.clipboard.write = (items) => Promise.reject(new Error('not here')); }")
    panel = page.page.locator("[data-panel=pool]")
    panel.hover()
    page.page.wait_for_timeout(200)
    shown = page.view("(() => { const c = view.panel('pool').canvas; return [c.width, c.height, c.toDataURL()]; })()")
    overlay = page.view("view.panel('pool').overlayShown")
    (tmp_path / "canvas.png").write_bytes(b64decode(shown[2].partition(",")[2]))
    for button in ("PNG", "Copy"):  # a browser that does not allow copies saves the file
        with page.page.expect_download() as download:
            panel.get_by_role("button", name=f"{button}:").click()
        assert download.value.suggested_filename == "trace-kv-pool-step-4.png"
        download.value.save_as(tmp_path / "saved.png")
        canvas, saved = image.open(tmp_path / "canvas.png"), image.open(tmp_path / "saved.png").convert("RGB")
        ratio = canvas.width / page.view("view.panel('pool').width")
        left, top = round(8 * ratio), round(44 * ratio)
        assert saved.size == (shown[0] + 2 * left, shown[1] + top + left)
        background = image.new("RGB", canvas.size, saved.getpixel((1, 1)))
        background.paste(canvas, mask=canvas.getchannel("A"))
        drawn = saved.crop((left, top, left + canvas.width, top + canvas.height))
        assert overlay or max(difference(drawn, background)) <= 2
        assert len(saved.crop((left, left, left + 100, top - 2)).getcolors(9999)) > 5, "no title"
    page.page.evaluate(
        """() => { navigator.clipboard.write = async ([item]) => {
            globalThis.copied = [item.types, (await item.getType("image/png")).size];
        }; }"""
    )
    panel.get_by_role("button", name="Copy:").click()
    page.page.get_by_text("KV pool is in the clipboard").wait_for()
    types, size = page.page.evaluate("globalThis.copied")
    assert types == ["image/png"] and size > 1000


def difference(a, b):
    """The largest difference of two pictures in each colour."""
    from PIL import ImageChops

    return [high for _, high in ImageChops.difference(a, b).getextrema()]


def test_the_time_of_day_of_a_step_is_that_of_the_command_line(page_of):
    requests = [{"id": "a", "prompt": {"len": 9}, "max_tokens": 40, "arrival_time": 0.0}]
    trace = simulate({"requests": requests, "cost_model": {"fixed": 2.3}})
    trace.meta = msgspec.structs.replace(trace.meta, created=1_795_000_000.4)
    page = page_of(trace)
    for step in (0, len(trace) // 3, len(trace) - 1):
        page.view("view.cursor.seek(argument)", step)
        page.frame()
        assert page.root.locator(".wb-clock").text_content() == time_of_day(trace.meta.created, trace[step].time)
    day = time_of_day(trace.meta.created, trace[-1].time, date=True).split()[0]
    assert day in page.root.locator(".wb-clock").get_attribute("title")
    trace.meta = msgspec.structs.replace(trace.meta, created=0.0)
    assert not page_of(trace).root.locator(".wb-clock").is_visible()


def test_a_large_pool_has_no_empty_frame(page_of):
    requests = [{"id": f"r{n}", "prompt": {"len": 900}, "max_tokens": 9} for n in range(4)]
    trace = simulate({"config": {"num_blocks": 16384, "max_num_batched_tokens": 2048}, "requests": requests})
    page = page_of(trace)
    page.frame()
    used = max(max(chunk.new_block_ids, default=0) for step in trace for chunk in step.chunks)
    shown, columns, cell = page.view("[view.panel('pool').shown, view.panel('pool').columns, view.panel('pool').cell]")
    assert used < shown <= 2 * used + 2 and columns == 32 and cell > 8
    hint = page.root.locator("[data-panel=pool] .wb-hint").inner_text()
    assert hint.endswith(f"; no step has used blocks {shown:,} to 16,383, which are left out")
    last_row = "panel.top + panel.cell * (panel.rows - 0.5)"
    block = page.view(f"(() => {{ const panel = view.panel('pool'); return panel.hit(1, {last_row}).block; }})()")
    assert block == shown - columns, "the last row begins with it"


def test_panels_outside_the_window_are_those_of_the_step_too(page_of, long_trace):
    """A screen reader reads a table, or the words of a picture, where nobody sees it."""
    page = page_of(long_trace, width=700, height=400)
    step = 40
    page.view("view.cursor.seek(3)")
    page.view("view.panels.forEach((panel) => ['packed', 'tables'].includes(panel.id) && panel.showTable(true))")
    page.frame()
    page.page.evaluate("scrollTo(0, 0)")
    page.wait("!view.panel('tables').visible && !view.panel('pool').visible")
    page.view("view.cursor.seek(argument)", step)
    captions = "[...root.querySelectorAll('.wb-table-view caption')].map((caption) => caption.textContent)"
    page.wait(f"{captions}.filter((words) => / step 40$/.test(words)).length === 2")
    page.wait("view.panel('pool').stale.size === 0")
    said = page.view("view.panel('pool').canvas.getAttribute('aria-label')")
    owned = int((long_trace.pool_state(step).state == 3).sum())
    assert said.startswith(f"KV pool: {owned} blocks in use, "), said
    assert not page.view("view.panel('tables').visible"), "it was never in the window"
    page.view("view.show('kernel')")
    page.view("view.cursor.seek(argument)", 60)
    page.frame()
    shown = page.view("view.panels.filter((panel) => panel.element.offsetParent).map((panel) => panel.id)")
    page.wait("view.panels.filter((panel) => panel.element.offsetParent).every((panel) => !panel.stale.size)")
    assert 0 < len(shown) < page.view("view.panels.length"), "a panel of another view is not drawn"
    assert page.view("view.panels.some((panel) => !panel.element.offsetParent && panel.stale.size > 0)")
