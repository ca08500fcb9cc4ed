"""The dashboard in a real browser: live, scrubbed, driven by keys, and with text nobody should trust."""

import json

import pytest
from viz_traces import HOSTILE_TEXTS, ReplayingController, hostile_trace, random_trace

from workbench import simulate
from workbench.trace.readings.narrate import shown
from workbench.viz.layout.columns import columns_of


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


def test_a_request_may_have_the_name_of_what_every_object_has(page_of):
    requests = [
        {"id": "r0", "prompt": {"len": 8}, "max_tokens": 12},
        {"id": "constructor", "prompt": {"len": 8}, "max_tokens": 4, "arrival_step": 5},
    ]
    trace = simulate({"requests": requests})[3:]
    page = page_of(trace)
    assert page.view("view.store.requests.map((r) => [r.id, view.store.stateOf(r, 0)])") == [
        ["r0", "running"],
        ["constructor", ""],
    ]


@pytest.mark.repeats(step=2)
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
        assert dict(drawn["why"]) == {rid: shown(reason) for rid, reason in record.not_scheduled.items()}
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
    assert page.root.get_by_role("dialog", name="Keyboard shortcuts").is_visible()
    press("Escape")
    assert page.root.get_by_role("dialog", name="Keyboard shortcuts").is_hidden()
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


@pytest.mark.repeats(of="test_the_last_frame_is_the_last_step_of_a_live_run")
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


def test_every_panel_has_a_name_a_focus_and_a_table(page_of, long_trace):
    page = page_of(long_trace, height=2600)
    page.view("view.cursor.seek(60)")
    page.root.focus()
    page.page.keyboard.press("t")
    page.frame()
    for panel in page.root.locator("section.wb-panel:not([hidden])").all():
        assert panel.get_attribute("aria-label")
        table = panel.locator(".wb-table-view")
        table.wait_for()
        assert table.get_attribute("tabindex") == "0"
        assert table.locator("th").count() >= 1
    packed = page.root.locator("[data-panel=packed] .wb-table-view tbody tr")
    assert packed.count() == len(long_trace[60].chunks)
    page.page.keyboard.press("t")
    for canvas in page.root.locator("canvas[role=img]").all():
        assert canvas.get_attribute("aria-label") and canvas.get_attribute("tabindex") == "0"
    assert page.root.locator("[aria-live=polite]").count() == 1


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_themes_draw_on_their_background(page_of, dark):
    page = page_of(random_trace(1), dark=dark)
    assert page.root.get_attribute("data-theme") == ("dark" if dark else "light")
    background = page.root.evaluate("(root) => getComputedStyle(root).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
    page.root.get_by_role("button", name="Switch between light and dark").click()
    assert page.root.get_attribute("data-theme") == ("light" if dark else "dark")


@pytest.mark.repeats(step=5)
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
    page.root.get_by_role("button", name="Send", exact=True).click()
    page.wait("view.question.queued.length === 1")
    assert controller.added == [("Once upon", {"max_tokens": 128, "temperature": 0, "priority": 0})]
    prompt = page.root.get_by_role("textbox", name="Prompt")
    prompt.fill("too much")
    page.root.get_by_role("button", name="Send", exact=True).click()
    page.wait("view.status.message === 'prompt must not be too much'")
    page.frame()
    assert page.root.get_by_role("alert").is_visible() and prompt.input_value() == "too much"
    prompt.focus()
    page.page.keyboard.press("Escape")
    focused = "root.getRootNode().activeElement"
    assert page.root.evaluate(f"(root) => {focused} === root"), "Escape leaves the box, and the shortcuts work"
    assert prompt.input_value() == "too much"


def test_step_and_pause_buttons(open_page, serve, long_trace):
    controller = ReplayingController(long_trace, seconds_per_step=0.02)
    page = open_page(serve(controller))
    page.root.get_by_role("button", name="Run one engine step").click()
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
    page = open_page(serve(controller), width=1440)
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
