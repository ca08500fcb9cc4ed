"""The first minute with a view: every action says its effect, and nothing misleads."""

import itertools
import re

import pytest
from viz_traces import ReplayingController, random_trace, workload

from workbench import Engine, EngineConfig, compare, simulate
from workbench.analysis.fork import fork
from workbench.viz.export_html import to_html


@pytest.fixture
def engine(tiny_llama):
    config = EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=128, long_prefill_token_threshold=16)
    with Engine(tiny_llama, config) as engine:
        engine.add_request(list(range(5, 65)), request_id="long", max_tokens=6)
        engine.add_request([40, 41, 42], request_id="short", max_tokens=6)
        yield engine


def blank(page, panel, x0, x1):
    """Whether the columns [x0, x1) of a panel's picture are empty."""
    return page.view(
        """((panel) => {
            const { canvas } = panel, [from, to] = argument.slice(1).map((x) => x * devicePixelRatio);
            const copy = new OffscreenCanvas(to - from, canvas.height);
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, -from, 0);
            return context.getImageData(0, 0, copy.width, copy.height).data.every((v) => v === 0);
        })(view.panel(argument[0]))""",
        [panel, x0, x1],
    )


def press(page, *keys):
    for key in keys:
        page.page.keyboard.press(key)
    page.frame()


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("name", ["tiny-llama", "SmolLM2-135M-Instruct"])
def test_the_bars_of_buttons_have_one_row_each(open_page, serve, engine, name, monkeypatch):
    """From a small laptop's width on, before and after a comparison brings one more button; no name is cut.

    One button shows the folded ones.
    """
    engine.run(progress=False)
    monkeypatch.setattr(type(engine), "name", name)
    page = open_page(serve(engine), width=1440)
    page.wait(f"view.store.numSteps === {len(engine.trace)} && view.name === '{name}'")
    for compares in (False, True):
        if compares:
            page.view("view.simulate(0, { max_num_batched_tokens: 8 })")
            page.wait("view.other && view.comparison")
        for width in (1024, 1100, 1180, 1280, 1366, 1440, 1536, 1920):
            page.page.set_viewport_size({"width": width, "height": 800})
            page.frame()
            page.frame()
            bars = page.root.locator(".wb-bar")
            assert [bars.nth(i).bounding_box()["height"] < 50 for i in range(2)] == [True, True], width
            assert page.root.get_by_title("comparison of two runs (C)").is_visible() == compares
            cut = page.root.evaluate(
                """(root) => [...root.querySelectorAll(".wb-first-bar :is(.wb-name, .wb-badge, .wb-button, .wb-tab)")]
                    .filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""
            )
            assert width < 1100 or cut == [], width
            right = bars.first.evaluate(
                "(bar) => Math.max(...[...bar.children].map((e) => e.getBoundingClientRect().right))"
            )
            assert right <= width - 15
    page.page.set_viewport_size({"width": 1100, "height": 800})
    step_into = page.root.get_by_role("button", name="Step into")
    assert step_into.is_hidden()
    page.root.get_by_role("button", name="Tools").click()
    assert step_into.is_visible() and page.root.get_by_role("button", name="Words: plain").is_visible()


@pytest.mark.parametrize("follower", [False, True])
def test_the_bar_of_the_cursor_keeps_its_row_when_the_page_is_behind(open_page, serve, engine, follower):
    """The button that catches up, with the engine or with the teacher, has room beside the others."""
    engine.run(progress=False)
    page = open_page(serve(engine), width=1440)
    page.wait(f"view.store.numSteps === {len(engine.trace)}")
    # The time of day and large numbers of steps take their room, too.
    page.view("Object.assign(view.store.facts, { created: 1.7e9, first_step: 12000 })")
    bar = page.root.locator(".wb-transport")
    catch_up = bar.locator(".wb-live")
    for exact, width in itertools.product((False, True), (1024, 1100, 1180, 1280, 1366, 1440)):
        page.page.set_viewport_size({"width": width, "height": 800})
        page.view("view.exact = argument", exact)
        page.view("view.cursor.toLive()")
        page.frame()
        before = bar.bounding_box()["height"]
        if follower:
            page.view("(view.status = { ...view.status, class: { ...view.status.class, role: 'follower' } })")
            page.view("Object.defineProperty(view.classroom, 'isAway', { value: true, configurable: true })")
        page.view("view.cursor.seek(3)")
        page.view("view.changed('data')")
        page.frame()
        page.frame()
        assert catch_up.is_visible() and catch_up.text_content() == ("Back to the teacher" if follower else "Follow")
        assert bar.bounding_box()["height"] == before < 50, width


HEADS = """(root) => [...root.querySelectorAll(".wb-panel > header")].filter((e) => e.offsetParent).map((header) => {
    const place = (e) => e.getBoundingClientRect(), { top, height } = place(header.querySelector("h3"));
    const buttons = [...header.querySelectorAll("button")].filter((e) => e.offsetWidth);
    const lines = document.createRange();
    lines.selectNodeContents(header.querySelector(".wb-hint"));
    const crosses = (a, b, from, to) => a[from] < b[to] - 1 && b[from] < a[to] - 1;
    const covers = (a, b) => crosses(a, b, "left", "right") && crosses(a, b, "top", "bottom");
    const name = header.parentElement.dataset.panel;
    const below = buttons.filter((e) => place(e).top > top + height).map((e) => `${name}: ${e.textContent}`);
    const over = buttons.filter((e) => [...lines.getClientRects()].some((line) => covers(place(e), line)));
    return [buttons.length, below, over.map((e) => `${name}: ${e.textContent}`)];
})"""
"""Of each panel the number of its buttons, those that are not on the line of its title, and those over its words."""


@pytest.mark.parametrize("width", [1100, 1280, 1440])
def test_the_buttons_of_a_panel_share_the_line_of_its_title_and_cover_no_words(open_page, serve, engine, width):
    engine.run(progress=False)
    page = open_page(serve(engine), width=width)
    page.wait(f"view.store.numSteps === {len(engine.trace)}")
    for view in ("story", "scheduler", "kernel"):
        page.view("view.show(argument)", view)
        page.frame()
        heads = page.root.evaluate(HEADS)
        assert max(count for count, *_ in heads) >= (4 if view == "kernel" else 3), "Copy, PNG and Table"
        assert [faults for _, *faults in heads if any(faults)] == []


# -- what if ------------------------------------------------------------------------------------------------------


def test_what_if_begins_at_the_first_step_and_says_what_has_changed(open_page, serve, engine):
    engine.run(progress=False)
    steps = len(engine.trace)
    page = open_page(serve(engine))
    page.wait(f"view.store.numSteps === {steps}")
    assert page.view("view.cursor.step") == steps - 1, "the view follows the end of the run"
    press(page, "w")
    dialog = page.root.get_by_role("dialog", name="What if")
    dialog.get_by_label("max_num_batched_tokens").fill("8")
    page.wait("view.other && view.other.comparison")
    page.frame()
    real = dialog.locator(".wb-verdict").text_content()
    panel = page.root.locator("[data-panel=compare]")
    is_timed = not real.startswith("steps ")  # the times of so short a run may vary too much to predict others
    sides = ["A: as it was, predicted", "B: changed, predicted"] if is_timed else ["A: this run", "B: simulated"]
    assert panel.locator(".wb-measures th").all_text_contents() == ["measure", *sides, "change"]
    rows = panel.locator(".wb-measures tbody td:first-child").all_text_contents()
    assert (rows[:2] == ["mean TTFT", "P99 TTFT"]) if is_timed else (rows[:2] == ["steps", "most KV blocks in use"])
    assert is_timed or real.startswith(f"steps {steps} -> "), real
    told = [where.locator(".wb-measures td").all_text_contents() for where in (dialog, panel)]
    assert told[0] == told[1] != [], "the box may cover the panel"
    words = panel.locator(".wb-facts").text_content()
    assert "simulated from the first step with token budget 8" in words and "never differ" not in words
    simulated = engine.fork(max_num_batched_tokens=8)
    assert page.view("view.other.numSteps") == len(simulated) > steps
    dialog.get_by_label("Begin").select_option("cursor")
    page.wait(f"view.other.comparison.fork.at_step === {steps - 1}")
    page.frame()
    assert f"simulated from step {steps - 1} with" in panel.locator(".wb-facts").text_content()
    assert "Requests keep the step in which they arrived" in panel.locator(".wb-facts").text_content()


def test_a_recording_is_simulated_under_another_setting_too(open_page, serve):
    """As a live engine, with the same words; the engine's buttons stay away."""
    requests = [{"id": f"r{i}", "prompt": {"len": 60}, "max_tokens": 5, "arrival_step": i} for i in range(4)]
    trace = simulate({"config": {"max_num_batched_tokens": 64}, "requests": requests})
    page = open_page(serve(trace))
    page.wait(f"view.store.numSteps === {len(trace)}")
    assert not page.root.get_by_role("button", name="Run: ").is_visible()
    page.root.get_by_role("button", name="What if").click()
    dialog = page.root.get_by_role("dialog", name="What if")
    dialog.get_by_label("max_num_batched_tokens").fill("16")
    page.wait("view.other && view.other.comparison")
    page.frame()
    assert page.view("view.other.numSteps") == len(fork(trace, max_num_batched_tokens=16)) > len(trace)
    steps = f"steps {len(trace)} -> {page.view('view.other.numSteps')}; "
    assert dialog.locator(".wb-verdict").text_content().startswith(steps), "steps of two budgets have no one length"
    assert "simulated from the first step with token budget 16" in page.root.locator(".wb-facts").first.text_content()


def test_a_comparison_with_a_run_without_a_clock_is_in_steps(open_page, tmp_path, engine):
    engine.run(progress=False)
    simulated = engine.fork(max_num_batched_tokens=8)
    to_html(engine.trace, tmp_path / "two.html", other=simulated)
    page = open_page(f"file://{tmp_path}/two.html", height=2000)
    page.wait("view.other && view.other.numSteps > 0")
    panel = page.root.locator("[data-panel=compare]")
    shown = [row.split("\t") for row in panel.locator(".wb-measures tbody tr").all_inner_texts()]
    expected = [[each.name, *each.values(), each.words] for each in compare(engine.trace, simulated).measures]
    assert shown == expected and shown[0][0] == "steps", "steps of two budgets do not last equally long"
    assert panel.get_by_label("Align the two runs by").locator("option[value=time]").is_disabled()
    panel.get_by_label("Rows of the requests").select_option("tokens")
    page.frame()
    row = page.view("view.panel('compare').rows.findIndex(([a]) => a.id === 'long')")
    lines = page.view("view.panel('compare').tokens.describe(argument, 1).lines", row)
    first, second = [record.step for record in engine.trace for c in record.chunks if c.request_id == "long"][-6:][:2]
    assert lines[1].endswith(f"in step {second}, after {second - first} step" + ("s" if second - first != 1 else ""))
    assert all(" step" in line and "''" not in line and '""' not in line for line in lines[1:]), lines
    longest = page.view("view.panel('compare').tokens.longest")
    gaps = [
        gap for trace in (engine.trace, simulated) for m in trace.metrics().requests.values() for gap in m.itl_steps
    ]
    assert longest == max(gaps)


# -- questions ----------------------------------------------------------------------------------------------------


def test_a_question_is_sent_by_enter_and_answered(open_page, serve, engine):
    engine.run(progress=False)
    page = open_page(serve(engine))
    page.wait("view.status.state === 'idle'")
    press(page, "a")
    prompt = page.root.get_by_role("textbox", name="Prompt")
    assert prompt.evaluate("(field) => field.getRootNode().activeElement === field")
    page.page.keyboard.type("w5 w6")
    press(page, "Shift+Enter")
    page.page.keyboard.type("w7")
    assert prompt.input_value() == "w5 w6\nw7"
    press(page, "Enter")
    assert prompt.input_value() == ""
    page.wait("view.store.requests.length === 3 && view.store.requests[2].tokens.length > 0")
    page.frame()
    assert page.root.get_by_role("region", name="Your question").is_visible() and page.view("view.theme.hue(2)")
    page.wait("view.status.state === 'idle'")
    press(page, "Escape", "a", "Enter")
    assert "prompt is empty" in page.root.get_by_role("alert").text_content()


def test_a_question_to_a_paused_engine_is_shown_as_queued(open_page, serve, engine):
    engine.step()
    page = open_page(serve(engine))
    page.wait("view.status.state === 'paused'")
    press(page, "a")
    page.page.keyboard.type("w5 w6")
    press(page, "Enter")
    page.root.locator("[data-panel=texts]").scroll_into_view_if_needed()
    card = page.root.locator(".wb-card[data-queued]")
    card.wait_for()
    assert "queued" in card.text_content() and "w5 w6" in card.text_content()
    assert page.view("view.status.state") == "paused"


# -- drawing ------------------------------------------------------------------------------------------------------


def test_a_wider_window_and_a_zoom_leave_nothing_behind(page_of, long_trace):
    page = page_of(long_trace, width=1100)
    for width in (1100, 1500, 1010):
        page.page.set_viewport_size({"width": width, "height": 800})
        page.wait(f"view.panel('gantt').width > {width} - 60 && view.panel('gantt').width <= {width}")
        page.frame()
        left = page.view("parseFloat(view.panel('gantt').overlay.style.left)")
        assert left == page.view("view.panel('gantt').width") - 176
    for _ in range(3):
        press(page, "]")
        for panel in ("timeline", "gantt", "metrics"):
            assert blank(page, panel, 84 - 6, 84 - 2), f"{panel} is drawn over its labels"


@pytest.mark.repeats(of="test_the_toolbar_stays_on_a_narrow_screen")
def test_panels_never_overlap(page_of, long_trace):
    import random

    rng = random.Random(7)
    page = page_of(long_trace)
    for _ in range(20):
        size = {"width": rng.randint(360, 2560), "height": rng.randint(500, 1400)}
        page.page.set_viewport_size(size)
        page.view("view.show(argument)", rng.choice(("story", "scheduler", "kernel", "all")))
        press(page, rng.choice(("]", "[", "0")))
        page.frame()
        boxes = page.root.evaluate(
            """(root) => [...root.querySelectorAll("section.wb-panel")].filter((panel) => panel.offsetParent)
                .map((panel) => [panel.dataset.panel, panel.getBoundingClientRect().toJSON()])"""
        )
        assert len(boxes) >= 2
        for i, (name, a) in enumerate(boxes):
            assert a["left"] >= 0 and a["right"] <= size["width"] + 0.5, f"{name} leaves the page of {size}"
            for other, b in boxes[:i]:
                apart = a["left"] >= b["right"] or b["left"] >= a["right"]
                apart = apart or a["top"] >= b["bottom"] or b["top"] >= a["bottom"]
                assert apart, f"{name} covers {other} at {size}"
        # A panel that was out of sight takes the new width when it is seen, a frame or two later.
        page.wait("root.scrollWidth <= root.clientWidth")


# -- the keyboard -------------------------------------------------------------------------------------------------


def test_the_keys_work_from_the_first_moment_and_never_stop(open_page, serve, long_trace):
    controller = ReplayingController(long_trace, seconds_per_step=0.002)
    page = open_page(serve(controller))
    page.page.keyboard.press("?")
    help_ = page.root.get_by_role("dialog", name="Keyboard shortcuts")
    assert help_.is_visible()
    button, box = (
        element.bounding_box() for element in (page.root.get_by_role("button", name="Keyboard shortcuts"), help_)
    )
    assert 0 <= box["y"] - (button["y"] + button["height"]) < 20, "the dialog opens below its button"
    press(page, "Escape")
    assert help_.is_hidden()
    run = page.root.get_by_role("button", name="Run the engine")
    run.focus()
    press(page, "Enter")
    page.wait(f"view.store.numSteps === {len(long_trace)}", timeout=30_000)
    page.wait("view.status.state === 'idle'")
    page.frame()
    focused = "root.getRootNode().activeElement"
    assert run.evaluate(f"(root) => {focused} === root"), "a button keeps the focus"
    press(page, "Enter")
    assert "nothing to run" in page.root.get_by_role("alert").text_content()
    page.root.locator("[data-panel=packed] canvas").first.focus()
    press(page, "t")
    assert page.root.locator("[data-panel=packed] .wb-table-view").evaluate(f"(root) => {focused} === root")
    press(page, "t", "Home")
    assert page.view("view.cursor.step") == 0
    speed = page.root.get_by_label("Playback speed")
    speed.select_option("20")
    speed.focus()
    press(page, "t")
    assert page.root.locator("[data-panel=packed] .wb-table-view").is_visible() and speed.input_value() == "20"
    press(page, "c")
    assert "What-if runs need" in page.root.get_by_role("alert").text_content() and speed.input_value() == "20"
    press(page, "t", "/")
    page.page.keyboard.type("r1")
    assert page.view("view.cursor.filter") == "r1"


def test_names_of_buttons_begin_with_their_words(open_page, serve, engine):
    """WCAG 2.5.3: speech control finds a button by the words that it shows."""
    engine.step()
    page = open_page(serve(engine))
    page.wait("view.store.numSteps === 1")
    for button in page.root.locator("button:visible").all():
        words, name = button.inner_text().strip(), button.get_attribute("aria-label")
        if name and any(letter.isalpha() for letter in words):
            assert name.lower().startswith(words.lower()), (words, name)


# -- the panels ---------------------------------------------------------------------------------------------------


def test_step_into_names_its_step_and_the_likely_words(open_page, serve, engine):
    while len(engine.trace) < 5:
        engine.step()
    page = open_page(serve(engine))
    page.wait("view.store.numSteps === 5")
    names = []
    while not names or names[-1] != "sample":
        before = page.view("JSON.stringify(view.status.phase || null)")
        press(page, "i")
        page.wait(f"JSON.stringify(view.status.phase || null) !== {before!r}")
        names.append(page.view("view.status.phase && view.status.phase.name"))
    page.frame()
    box = page.root.get_by_role("region", name="Step into")
    assert box.locator("strong").text_content() == "Inside step 5: sample"
    assert "the last of them is step 4" in box.text_content()
    rows = page.view("view.status.phase.candidates")
    (_, sampled) = engine.phase
    assert [row["sampled"] for row in rows] == [s.token_id for s in sampled]
    for row in rows:
        assert row["request"] in ("long", "short") and len(row["candidates"]) >= 5
        chances = [token["probability"] for token in row["candidates"]]
        assert chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1
        assert row["candidates"][0]["text"] == engine.tokenizer.decode([row["candidates"][0]["id"]])
    assert box.locator(".wb-candidates li[data-sampled]").count() == len(rows)
    assert "removed by temperature" in box.locator(".wb-candidates").first.text_content()


@pytest.mark.repeats(of="test_step_into_names_its_step_and_the_likely_words")
def test_an_output_token_shows_the_likely_words_beside_it(open_page, serve, tiny_llama):
    config = EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=64, record_top_tokens=4)
    with Engine(tiny_llama, config) as engine:
        engine.add_request([40, 41, 42], request_id="warm", max_tokens=5, temperature=1.0, top_k=2, seed=1)
        engine.run(progress=False)
        page = open_page(serve(engine), height=1600)
        page.wait(f"view.store.numSteps === {len(engine.trace)}")
        page.frame()
        page.root.locator("[data-request='0']").hover()
        tokens = page.root.locator("[data-request='0'] .wb-output span")
        for number in range(5):
            tokens.nth(number).hover()
            bars = page.root.get_by_role("tooltip").locator(".wb-bars li")
            (top,) = engine.trace.supplement(number, "top_tokens")["tokens"]
            assert bars.count() == len(top["candidates"]) >= 4
            for bar, candidate in zip(bars.all(), top["candidates"]):
                words = bar.text_content()
                assert f"{candidate['probability']:.1%}" in words
                assert ("removed by top k" in words) == (candidate["removed_by"] == "top_k")
                assert (" sampled" in words) == (candidate["id"] == top["sampled"])
        assert "top_k 2 left 2 of" in page.root.get_by_role("tooltip").text_content()
        tokens.nth(1).click()
        page.frame()
        assert page.root.locator(".wb-drawer .wb-bars li").count() >= 4


def test_a_click_on_a_block_says_what_it_is_and_keeps_its_colour(page_of, long_trace):
    page = page_of(long_trace, height=2600)
    step = next(record.step for record in long_trace if len(record.chunks) >= 4)
    page.view("view.cursor.seek(argument)", step)
    page.frame()
    focus = page.view("[...view.theme.focus]")
    block = long_trace[step].block_table(1)[0]
    owner = long_trace.pool_state(step).owners(block)[0]
    x, y = page.view("view.panel('pool').xy(argument).map((v) => v + 3)", block)
    page.root.locator("[data-panel=pool] canvas").first.click(position={"x": x, "y": y})
    page.frame()
    drawer = page.root.locator(".wb-drawer")
    assert drawer.get_by_role("heading").text_content() == f"KV block {block}"
    assert page.view("[...view.theme.focus]") == focus
    drawer.get_by_role("button", name=owner, exact=True).click()
    page.frame()
    assert drawer.get_by_role("heading").text_content() == owner
    press(page, "Escape")
    assert drawer.is_hidden()


@pytest.mark.repeats(of="test_the_mask_of_a_step_is_two_actions")
def test_a_mask_is_drawn_in_every_step(page_of):
    """Also of a batch that has few rows and much context."""
    requests = [{"id": f"r{i}", "prompt": {"len": 300}, "max_tokens": 5} for i in range(3)]
    page = page_of(simulate({"requests": requests}, config={"max_num_batched_tokens": 512}))
    for step in range(page.view("view.store.numSteps")):
        page.view("view.cursor.seek(argument)", step)
        page.frame()
        assert page.view("view.panel('rectangle').mode") in ("one", "batch")
        assert not blank(page, "rectangle", 90, 400)


def test_only_a_request_that_runs_can_be_aborted(open_page, serve, engine):
    engine.run(progress=False)
    page = open_page(serve(engine))
    page.wait("view.status.state === 'idle' && view.store.numSteps > 4")
    press(page, "Home", "ArrowRight")
    assert page.root.get_by_role("button", name="Abort", exact=False).count() == 0
    engine.abort("long")
    assert engine.state == "idle"


def test_texts_name_their_end_and_show_whole_prompts(page_of, smollm2):
    prompt = "word " * 200 + "the end"
    with Engine(smollm2, max_num_batched_tokens=512, num_blocks=64) as engine:
        engine.generate([[{"role": "user", "content": "What is the capital of France?"}]], max_tokens=12)
        engine.generate(prompt, max_tokens=1)
        trace = engine.trace
    page = page_of(trace, height=2600)
    page.view("view.cursor.toLive()")
    page.frame()
    card = page.root.locator("[data-request='0']")
    assert "model ended" in card.text_content() and "<|im_start|>" not in card.text_content()
    page.root.locator("[data-request='1']").get_by_role("button", name="show all").click()
    assert prompt in page.root.locator("[data-request='1']").text_content()
    press(page, "t")
    cells = page.root.locator("[data-panel=texts] .wb-table-view tbody tr").first.locator("td").all_text_contents()
    assert cells[-1] == "The capital of France is Paris."


def test_a_view_whose_host_has_gone_offers_nothing_that_the_host_would_answer(open_page, serve, engine):
    engine.step()
    page = open_page(serve(engine))
    page.wait("view.store.numSteps === 1 && view.status.can?.includes('fork')")
    page.frame()
    page.root.get_by_role("button", name="What if").first.click()
    dialog = page.root.get_by_role("dialog", name="What if")
    dialog.wait_for()
    page.view("(view.lose('It has ended.', 'kernel ended'), null)")
    page.frame()
    assert not dialog.is_visible(), "its answer would never come"
    for name in ("What if", "Which setting?", "Copy link", "Save HTML", "Run: "):
        assert page.root.get_by_role("button", name=name).count() == 0, name
    assert page.root.get_by_role("button", name="Explain this step").count() == 1, "what the page knows stays"


def test_the_toolbar_stays_on_a_narrow_screen(open_page, serve, engine):
    engine.step()
    page = open_page(serve(engine), width=390, height=844)
    page.wait("view.store.numSteps === 1")
    for view in ("story", "scheduler", "kernel"):
        page.view("view.show(argument)", view)
        page.frame()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
        for button in page.root.locator("button:visible").all():
            box = button.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, button.text_content()


def test_a_phone_has_one_line_a_bar_and_room_for_a_finger(open_page, serve, engine):
    """Tools bring back the folded buttons; one that cannot be used takes no room."""
    engine.step()
    page = open_page(serve(engine), width=390, height=844)
    page.wait("view.store.numSteps === 1 && view.status.state === 'paused'")
    page.frame()
    bars = page.root.locator(".wb-controls")

    def named(name):
        return bars.locator("button", has_text=re.compile(f"^{re.escape(name)}$"))

    shown = bars.locator("button:visible, select:visible").all()
    sizes = [button.bounding_box() for button in shown]
    assert len(shown) >= 9 and all(box["width"] >= 40 and box["height"] >= 40 for box in sizes)
    assert len({round(box["y"] / 20) for box in sizes}) <= 4, "title, engine, views and cursor"
    assert bars.bounding_box()["height"] <= 240
    assert named("Run").is_visible() and named("Step").is_visible()
    folded = [named(name) for name in ("Pause", "Ask", "Breakpoints", "|◀")]
    assert not any(button.is_visible() for button in folded)
    named("Tools").click()
    assert all(button.is_visible() for button in folded)
    tabs = bars.locator(".wb-tab:visible").all()
    assert len(tabs) >= 4 and all(tab.bounding_box()["width"] >= 40 for tab in tabs)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("width", (390, 1440))
def test_the_legend_of_the_pool_is_whole(open_page, serve, engine, width):
    """An entry without room moves to the next line, and no cell of the pool is below the words."""
    engine.run(progress=False)
    page = open_page(serve(engine), width=width, height=844)
    page.wait("view.store.numSteps > 1")
    page.frame()
    entries = page.root.evaluate(
        """(root) => {
          const panel = root.workbench.panels.find((panel) => panel.element.dataset.panel === "pool"), found = [];
          const context = panel.canvas.getContext("2d"), { fillText } = context;
          context.fillText = function (words, x, y) {
            found.push({ words, y, right: x + this.measureText(words).width });
            fillText.call(this, words, x, y);
          };
          panel.layout();
          panel.draw(context, panel.width);
          delete context.fillText;
          return { found, width: panel.width, top: panel.top };
        }"""
    )
    (changed,) = [entry for entry in entries["found"] if entry["words"] == "changed in this step"]
    legend = [entry for entry in entries["found"] if entry["words"] not in ("changed in this step", "evicted next")]
    others = [entry for entry in legend if entry["y"] < 30]
    assert len(others) == 3 and all(entry["right"] <= entries["width"] for entry in [changed, *others])
    assert changed["y"] + 6 < entries["top"]
    assert (changed["y"] > others[0]["y"]) == (width == 390)


def test_a_comparison_fits_on_a_narrow_screen(open_page, tmp_path, engine):
    engine.run(progress=False)
    to_html(engine.trace, tmp_path / "two.html", other=engine.fork(max_num_batched_tokens=8))
    page = open_page(f"file://{tmp_path}/two.html#story", width=390, height=844)
    page.wait("view.other && view.other.comparison")
    page.frame()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    for hint in page.root.locator("section .wb-hint:visible").all():
        assert hint.evaluate("(hint) => hint.scrollWidth <= hint.clientWidth"), hint.text_content()


@pytest.mark.repeats(of="test_the_toolbar_stays_on_a_narrow_screen")
def test_the_buttons_of_the_view_stay_together(open_page, serve, engine):
    engine.step()
    page = open_page(serve(engine), width=1440, height=800)
    page.wait("view.store.numSteps === 1 && view.status.state === 'paused'")
    page.frame()
    buttons = page.root.locator(".wb-of-view button:visible").all()
    middles = {round(box["y"] + box["height"] / 2) for box in (button.bounding_box() for button in buttons)}
    assert len(buttons) == 8 and max(middles) - min(middles) < 3, middles


# -- four questions -----------------------------------------------------------------------------------------------


def test_why_was_a_request_not_scheduled_is_one_hover(page_of):
    trace = simulate(workload(3, num_requests=12, max_num_batched_tokens=24, max_num_seqs=3))
    step = next(record.step for record in trace if record.not_scheduled)
    request, reason = next(iter(trace[step].not_scheduled.items()))
    page = page_of(trace)
    page.view("view.show('story')")
    page.frame()
    x = page.view("(view.panel('gantt').axis().x(argument) + view.panel('gantt').axis().end(argument)) / 2", step)
    row = page.view("view.panel('gantt').shown().findIndex((r) => r.id === argument)", request)
    page.root.locator("[data-panel=gantt] canvas:not(.wb-legend)").first.hover(
        position={"x": x, "y": 18 + row * 16 + 8}
    )
    assert str(reason)[:80] in page.root.get_by_role("tooltip").text_content()


def test_which_block_holds_a_token_is_one_search(page_of):
    requests = [
        {"id": "long", "prompt": {"len": 900}, "max_tokens": 4},
        {"id": "other", "prompt": {"len": 30}, "max_tokens": 4},
    ]
    trace = simulate({"requests": requests}, config={"max_num_batched_tokens": 128, "long_prefill_token_threshold": 96})
    step = next(r.step for r in trace for c in r.chunks if c.request_id == "long" and c.start <= 700 < c.end)
    block = trace[step].block_tables["long"][700 // 16]
    page = page_of(trace)
    press(page, "/")
    page.page.keyboard.type("long 700")
    answer = page.root.locator(".wb-answers li")
    assert answer.text_content() == f"Token 700 of long: block {block}, slot {700 % 16} of 16, written in step {step}."
    press(page, "Enter")
    assert page.root.locator(".wb-drawer").get_by_role("heading").text_content() == f"KV block {block}"
    press(page, "/")
    page.page.keyboard.type("step 5")
    press(page, "Enter")
    assert page.view("view.cursor.step") == 5
    press(page, "/")
    page.page.keyboard.type("finished")
    assert answer.count() == 2


def test_the_mask_of_a_step_is_two_actions(page_of, long_trace):
    page = page_of(long_trace)
    page.view("view.show('story')")
    press(page, "3")
    press(page, "/")
    page.page.keyboard.type("step 12")
    press(page, "Enter")
    chunk = page.view("view.panel('rectangle').mode === 'one' ? view.panel('rectangle').shape : null")
    record = long_trace[12]
    sizes = [[c.num_tokens, c.end] for c in record.chunks]
    assert chunk in sizes or page.view("view.panel('rectangle').shape") == [
        record.num_tokens,
        sum(c.end for c in record.chunks),
    ]
    assert not blank(page, "rectangle", 90, 400)


def test_what_a_smaller_budget_would_have_done_is_two_actions(open_page, serve, tiny_llama, engine):
    engine.run(progress=False)
    page = open_page(serve(engine).rstrip("/") + "/#story")
    card = page.root.get_by_role("region", name="The run is over")
    card.wait_for()
    card.get_by_role("button", name="Try a budget of 12").click()
    page.wait("view.other && view.other.comparison")
    page.frame()
    assert page.root.locator("[data-panel=compare] .wb-verdict").is_visible()
    press(page, "w")
    assert page.root.get_by_role("dialog", name="What if").get_by_label("max_num_batched_tokens").input_value() == "12"
    press(page, "Escape")
    # Against a second real run.
    with Engine(tiny_llama, engine.config, max_num_batched_tokens=12) as second:
        for request_id in ("long", "short"):
            info = engine.trace.requests[request_id]
            second.add_request(list(info.prompt_token_ids), request_id=request_id, max_tokens=6)
        second.run(progress=False)
    chunks = page.view(
        """Array.from({ length: view.other.numSteps }, (_, step) =>
            view.other.chunks(step).map((c) => [c.request.id, c.start, c.n]))"""
    )
    assert chunks == [[[c.request_id, c.start, c.num_tokens] for c in record.chunks] for record in second.trace]


@pytest.mark.repeats(of="test_what_a_smaller_budget_would_have_done_is_two_actions")
def test_what_a_smaller_budget_would_have_done_by_keyboard_alone(open_page, serve, engine):
    engine.run(progress=False)
    page = open_page(serve(engine).rstrip("/") + "/#story")
    page.wait(f"view.store.numSteps === {len(engine.trace)}")
    press(page, "w")
    dialog = page.root.get_by_role("dialog", name="What if")
    focused = "(root) => root.getRootNode().activeElement"
    slider = page.root.evaluate_handle(focused)
    assert slider.evaluate("(slider) => slider.type") == "range" and "budget" in slider.get_attribute("aria-label")
    press(page, "Tab")
    page.page.keyboard.type("12")  # a field that is reached by Tab is selected
    press(page, "Enter")
    page.wait("view.other && view.other.comparison")
    fork = engine.fork(at_step=0, max_num_batched_tokens=12)
    page.wait(f"view.other.numSteps === {len(fork)}")
    verdict = dialog.get_by_role("status")
    verdict.get_by_text(f"steps {len(engine.trace)} -> {len(fork)}").wait_for()  # too few steps for times
    press(page, "Escape")
    assert dialog.is_hidden() and page.root.locator("[data-panel=compare] .wb-verdict").text_content()


def test_every_step_is_told(page_of):
    trace = random_trace(3)
    page = page_of(trace)
    for step in (0, 3, len(trace) - 1):
        page.view("view.cursor.seek(argument)", step)
        page.frame()
        assert page.root.locator(".wb-sentence").text_content() == str(trace[step])
        assert str(trace[step]) in page.root.locator(
            "[data-panel=timeline] canvas:not(.wb-legend)"
        ).first.get_attribute("aria-label")


def test_every_token_of_a_speculative_step_is_shown(page_of):
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 12, "accepts": [2, 0, 3, 1], "arrival_step": i}
        for i in range(3)
    ]
    config = {"max_num_batched_tokens": 64, "num_speculative_tokens": 3, "block_size": 4, "num_blocks": 64}
    trace = simulate({"config": config, "requests": requests})
    appended = {request_id: [] for request_id in trace.requests}
    for record in trace:
        for chunk in record.chunks:
            appended[chunk.request_id] += chunk.accepted
    assert max(len(c.accepted) for r in trace for c in r.chunks) > 1, "drafts are accepted"
    page = page_of(trace)
    shown = page.view("view.store.requests.map((r) => [r.id, r.tokens.map((t) => t.id)])")
    assert dict(shown) == appended
    page.view("view.cursor.toLive()")
    page.frame()
    counts = page.view("view.store.requests.map((r) => view.store.numOutput(r, view.cursor.step))")
    assert counts == [len(tokens) for tokens in appended.values()] == [12, 12, 12]


@pytest.mark.parametrize("width", (390, 1280))
def test_the_answer_of_a_smaller_budget_is_scrolled_into_view(open_page, serve, engine, width):
    """The card with the button disappears; the answer is a screen away on a phone."""
    engine.run(progress=False)
    page = open_page(serve(engine) + "#live", width=width, height=700)
    button = page.root.get_by_role("button", name="Try a budget of 12")
    button.scroll_into_view_if_needed()
    button.click()
    page.wait("view.comparing")
    page.page.wait_for_function(
        """(panel) => {
          const { top } = panel.getBoundingClientRect(), bars = panel.getRootNode().querySelector(".wb-controls");
          const covered = getComputedStyle(bars).position === "sticky" ? bars.getBoundingClientRect().bottom : 0;
          return top >= covered - 1 && top < innerHeight - 200;
        }""",
        arg=page.root.locator("[data-panel=compare]").element_handle(),
        timeout=10_000,
    )
