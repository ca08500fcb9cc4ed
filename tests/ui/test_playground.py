"""The playground in a real browser, served below another page's address, without a network."""

import base64
import hashlib
import json
import random
import re
import threading
import time
import zlib

import feature_workloads
import pytest
from pyodide_node import need_pyodide
from tab_stops import unreached
from viz_traces import random_trace

from workbench import simulate, simulate_fleet
from workbench.analysis.fork import fork
from workbench.apps.playground import server, site
from workbench.apps.playground.presets import POLICIES, PRESETS
from workbench.apps.playground.session import Session
from workbench.viz.duel import outcome
from workbench.viz.glossary import TERMS

PATIENCE = 180_000
"""Milliseconds: Python starts in two seconds on a quiet machine, and tests run on busy ones."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    need_pyodide()
    folder = tmp_path_factory.mktemp("site")
    site.build(folder / "docs" / "playground")
    service = server.make_server(folder)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{service.server_port}/docs/playground/"
    service.shutdown()
    service.server_close()


class Page:
    """A page of the playground, with every request and problem since it was opened."""

    def __init__(self, browser, address, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.requests, self.problems = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.problems.append(m.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(address)
        self.settle()

    def settle(self):
        """Wait until no run is in progress and none is to come."""
        self.page.wait_for_function(
            "() => { const p = globalThis.playground; return p?.view && !p.busy && !p.running && !p.stale; }",
            timeout=PATIENCE,
        )

    def store(self, expression="store", which="store"):
        """Evaluate an expression of ``store``, the run on display, or of the one that it is compared with."""
        return self.page.evaluate(
            "([which, expression]) => { const view = document.getElementById('view').shadowRoot"
            ".querySelector('.wb-root').workbench; const store = which === 'store' ? view.store : view.other; "
            "return store && new Function('store', `return ${expression}`)(store); }",
            [which, expression],
        )

    def decodes(self, which="store"):
        """Decode tokens of every step."""
        return self.store("[...store.column('decode_tokens').subarray(0, store.numSteps)]", which)

    def slide(self, name, value, *, settles=True):
        """Move a slider to a value; it runs at once, unless a bet is awaited."""
        self.page.evaluate(
            "([name, value]) => { const control = playground.settings.controls.find((c) => c.name === name); "
            "control.range.value = control.steps.indexOf(value); control.range.dispatchEvent(new Event('input')); }",
            [name, value],
        )
        if settles:
            self.settle()

    def type(self, name, text):
        self.page.eval_on_selector(
            f"#{name}",
            "(area, text) => { area.value = text; area.dispatchEvent(new Event('input', { bubbles: true })); }",
            text,
        )
        self.settle()

    def digest(self):
        """SHA-256 of the packet of the run on display."""
        return self.page.evaluate(
            "async () => [...new Uint8Array(await crypto.subtle.digest('SHA-256', playground.values.packet))]"
            ".map((byte) => byte.toString(16).padStart(2, '0')).join('')"
        )

    def text(self, name):
        return self.page.text_content(f"#{name}")


@pytest.fixture
def open_playground(browser, address):
    """A function that opens a page, with what follows "#"; the pages must end without problems."""
    pages = []

    def open_(link="", **options):
        page = Page(browser, address + link, **options)
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.context.close()
    for page in pages:
        assert not page.problems, f"the browser complains: {page.problems}"
        assert all(url.startswith((address, "blob:http://127.0.0.1", "data:")) for url in page.requests)


def packet_of(session, workload, replicas=1):
    command = {"command": "run", "workload": json.dumps(workload), "replicas": replicas}
    return session.handle(json.dumps(command)).packet


def decodes_of(trace):
    return [step.num_decode_tokens for step in trace]


def test_every_preset_slider_switch_and_policy(open_playground):
    page = open_playground()
    after_start = len(page.requests)
    tip = page.page.locator("#tip")
    page.page.get_by_text("Seats", exact=True).hover()
    assert TERMS["seat"] in tip.text_content() and "max_num_seqs" in tip.text_content() and tip.is_visible()
    page.page.mouse.move(1, 1)
    assert not tip.is_visible()
    page.page.get_by_role("slider", name="Token budget").focus()
    page.page.keyboard.press("Tab")
    assert TERMS["seat"] in tip.text_content() and tip.is_visible()
    page.page.keyboard.press("Escape")
    assert not tip.is_visible()
    for control in page.page.locator("#settings input").all():
        assert len(control.get_attribute("aria-description")) > 20
    session = Session()  # is given the same commands as the page's, here
    page.page.select_option("#preset", "bursts")
    page.settle()
    for name in ("chunked", "bursts"):
        packet_of(session, PRESETS[name].workload)
    for name, preset in PRESETS.items():
        page.page.select_option("#preset", name)
        page.settle()
        assert page.digest() == hashlib.sha256(packet_of(session, preset.workload, preset.replicas)).hexdigest(), name
        assert preset.replicas > 1 or page.decodes() == decodes_of(simulate(preset.workload)), name
        assert page.text("hint") == preset.hint
    page.page.select_option("#preset", "chunked")
    page.settle()
    workload = PRESETS["chunked"].workload
    page.slide("max_num_batched_tokens", 64)
    assert page.decodes() == decodes_of(simulate(workload, config={"max_num_batched_tokens": 64}))
    page.page.uncheck("[name=enable_prefix_caching]")
    page.page.check("[name=async_scheduling]")
    page.settle()
    config = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "async_scheduling": True}
    assert page.decodes() == decodes_of(simulate(workload, config=config))
    page.page.click("#reset")
    page.page.select_option("#preset", "own-policy")
    page.settle()
    for name, source in POLICIES.items():
        page.page.select_option("#policy", name)
        page.settle()
        names = {}
        exec(f"from workbench.scheduler.policy import SchedulingPolicy\n{source}", names)
        expected = simulate(PRESETS["own-policy"].workload, policy=names[name]())
        assert page.decodes() == decodes_of(expected) and page.page.input_value("#source") == source
    page.page.click("#why summary")
    page.page.select_option("#request", "r7")
    page.page.wait_for_function("() => document.getElementById('explanation').textContent.startsWith('r7')")
    assert page.requests[after_start:] == [], "nothing is loaded after the start"


@pytest.mark.repeats(of="test_every_preset_slider_switch_and_policy")
def test_random_workloads_give_the_packets_of_cpython(open_playground):
    """Their bytes hold every step; all kinds, 200 of them, through the page's own worker."""
    page = open_playground()
    rng, here = random.Random(190), Session()
    here.handle(json.dumps({"command": "run", "workload": json.dumps(PRESETS["chunked"].workload)}))
    kinds = feature_workloads.KINDS
    commands = [
        json.dumps({"command": "run", "workload": json.dumps(feature_workloads.random_workload(kind, rng))})
        for kind in (kinds[i % len(kinds)] for i in range(200))
    ]
    found = page.page.evaluate(
        """async (commands) => {
          const digest = async (bytes) => [...new Uint8Array(await crypto.subtle.digest("SHA-256", bytes))]
            .map((byte) => byte.toString(16).padStart(2, "0")).join("");
          const digests = [];
          for (const command of commands) {
            const { facts, packet } = await playground.engine.ask(JSON.parse(command));
            digests.push(facts.error ?? await digest(packet));
          }
          return digests;
        }""",
        commands,
    )
    for number, (command, there) in enumerate(zip(commands, found, strict=True)):
        packet = here.handle(command).packet
        assert packet is not None and there == hashlib.sha256(packet).hexdigest(), f"workload {number}"


def test_a_link_shows_the_same_run_in_a_new_page(open_playground):
    page = open_playground()
    page.page.select_option("#preset", "bursts")
    page.slide("max_num_seqs", 4)
    page.page.click("#pin")
    page.settle()
    page.slide("max_num_batched_tokens", 128)
    page.page.select_option("#policy", "own")
    page.type("source", POLICIES["ShortestFirst"].replace("ShortestFirst", "Mine"))
    workload = PRESETS["bursts"].workload
    assert page.decodes("other") == decodes_of(simulate(workload, config={"max_num_seqs": 4}))
    link = page.page.evaluate("async () => { await playground.share(); return location.hash; }")
    assert len(link) < 1000
    other = open_playground(link)
    for which in ("store", "other"):
        assert other.decodes(which) == page.decodes(which) != None  # noqa: E711  # a list, from both
    assert other.decodes("other") != other.decodes()
    assert other.text("verdict") == page.text("verdict") != ""
    assert other.page.input_value("#source") == page.page.input_value("#source")
    assert other.page.text_content("#pin") == "Unpin A"
    other.page.click("#pin")
    other.settle()
    assert other.decodes() == page.decodes() and other.store(which="other") is None


def test_the_newest_run_is_drawn_and_the_pinned_one_outlined(open_playground):
    """Every panel shows the run that is set; the axis and the scale hold both runs, whichever is longer."""
    page = open_playground()
    page.page.click("#pin")
    page.settle()
    workload = PRESETS["chunked"].workload
    pinned = simulate(workload)
    for budget in (64, 4096):
        page.slide("max_num_batched_tokens", budget)
        now = simulate(workload, config={"max_num_batched_tokens": budget})
        assert page.decodes() == decodes_of(now) and page.decodes("other") == decodes_of(pinned)
        assert page.store("store.facts.config.max_num_batched_tokens") == budget
        found = page.page.evaluate(
            "(() => { const view = document.getElementById('view').shadowRoot.querySelector('.wb-root').workbench; "
            "const panel = view.panel('timeline'), axis = panel.axis(), most = panel.scale(axis).tokens; "
            "const last = (store) => axis.byTime ? axis.xOfTime(store.clockEnd.data[store.numSteps - 1]) "
            ": axis.x(store.numSteps); return { most, x1: axis.x1, "
            "ends: [view.store, view.other].map(last), first: view.panel('compare').stores[0] === view.other }; })()"
        )
        assert max(found["ends"]) <= found["x1"] + 0.01 and found["first"]
        assert found["most"] >= max(step.num_tokens for trace in (now, pinned) for step in trace)


def test_a_recording_is_dropped_forked_and_stays_in_the_page(open_playground, tmp_path):
    trace = random_trace(3)
    trace.save(tmp_path / "mine.jsonl.gz")
    page = open_playground()
    before = len(page.requests)
    page.page.evaluate(
        "(bytes) => { const data = new DataTransfer(); "
        "data.items.add(new File([new Uint8Array(bytes)], 'mine.jsonl.gz')); "
        "dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true })); }",
        list((tmp_path / "mine.jsonl.gz").read_bytes()),
    )
    page.page.wait_for_selector("#recording:not([hidden])", timeout=PATIENCE)
    page.settle()
    assert page.decodes() == decodes_of(trace) and "mine.jsonl.gz" in page.text("recording-name")
    page.slide("max_num_batched_tokens", 32)
    assert page.decodes() == decodes_of(fork(trace, max_num_batched_tokens=32))
    assert page.decodes("other") == decodes_of(trace)
    assert page.text("verdict") != ""
    reset = page.page.locator("#reset")
    assert reset.text_content() == "As recorded"
    reset.click()
    page.settle()
    assert page.decodes() == decodes_of(trace) and reset.is_hidden()
    assert page.requests[before:] == [], "a recording causes no request"
    (tmp_path / "broken.jsonl").write_text("no trace\n")
    page.page.set_input_files("#file", tmp_path / "broken.jsonl")
    page.page.wait_for_selector("#error:not([hidden])", timeout=PATIENCE)
    assert page.text("error").startswith("broken.jsonl is not a trace")
    page.page.click("#close-recording")
    page.page.wait_for_selector("#workload:not([hidden])", timeout=PATIENCE)
    page.settle()
    assert page.decodes() == decodes_of(simulate(PRESETS["chunked"].workload))
    page.slide("max_num_batched_tokens", 32)
    assert reset.text_content() == "As in the workload" and reset.is_visible()


def test_times_that_cannot_be_compared_are_dashes(open_playground):
    page = open_playground()
    workload = {name: value for name, value in PRESETS["chunked"].workload.items() if name != "cost_model"}
    page.type("text", json.dumps(workload))
    page.page.click("#pin")
    page.settle()
    budget = workload.get("config", {}).get("max_num_batched_tokens", 2048)
    page.slide("max_num_seqs", 2)
    page.page.wait_for_function("() => document.querySelectorAll('#numbers tbody tr').length === 2")
    assert "steps" in page.text("numbers").rpartition("B")[2]
    page.slide("max_num_batched_tokens", 64 if budget != 64 else 128)
    page.page.wait_for_function(
        "() => document.querySelector('#numbers td + td, #numbers tbody td').textContent === '–'"
    )
    rows = page.page.eval_on_selector_all(
        "#numbers tbody tr", "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["A", "B"]
    for row in rows:
        assert row[1:8] == ["–"] * 7 and row[8].isdigit(), "latencies, rate and duration; then the number of steps"
    assert "A and B have no times" in page.text("numbers")


def test_the_meaning_of_a_heading_covers_no_number_and_waits_for_the_pointer(open_playground):
    page = open_playground()
    page.settle()
    heading, tip, table = (
        page.page.locator(it) for it in ("#numbers .term >> text=budget used", "#tip", "#numbers table")
    )
    heading.hover()
    assert tip.is_visible()
    shown, numbers, own = tip.bounding_box(), table.bounding_box(), heading.bounding_box()
    assert shown["y"] >= numbers["y"] + numbers["height"] or shown["y"] + shown["height"] <= own["y"]
    page.page.keyboard.press("Escape")
    # The table moves below a pointer that rests, as after a run.
    page.page.evaluate("document.querySelector('#numbers').replaceChildren(document.querySelector('#numbers table'))")
    heading.evaluate("(term) => term.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))")
    assert not tip.is_visible()


@pytest.mark.repeats(of="test_a_link_shows_the_same_run_in_a_new_page")
def test_a_link_written_by_hand_and_a_frame_on_another_page(open_playground, address):
    page = open_playground("#preset=bursts&max_num_seqs=4&enable_prefix_caching=false")
    config = {"max_num_seqs": 4, "enable_prefix_caching": False}
    assert page.decodes() == decodes_of(simulate(PRESETS["bursts"].workload, config=config))
    other = page.context.new_page()
    other.set_default_timeout(PATIENCE)
    other.set_content(f'<iframe src="{address}#preset=chunked" width="900" height="700"></iframe>')
    frame = other.frame_locator("iframe")
    frame.locator("#numbers td").first.wait_for()
    assert not frame.locator("#workload").is_visible() and not frame.locator("body > header").is_visible()


def test_neither_the_page_nor_its_worker_can_reach_another_server(open_playground):
    page = open_playground()
    attempt = "fetch('https://example.org/').then(() => 'sent', () => 'refused')"
    assert page.page.evaluate(f"() => {attempt}") == "refused"
    policy = "import js\nclass P(SchedulingPolicy):\n    pass\n"
    page.page.select_option("#policy", "own")
    page.type("source", policy + 'js.eval("fetch(`https://example.org/`)")')
    assert all("Content Security Policy" in problem for problem in page.problems) and len(page.problems) >= 2
    page.problems.clear()
    page.requests[:] = [url for url in page.requests if "example.org" not in url]


def test_mistakes_are_named_and_can_be_mended_and_a_long_run_cancelled(open_playground):
    page = open_playground()
    before = page.decodes()
    page.page.select_option("#policy", "ShortestFirst")
    page.type("source", POLICIES["ShortestFirst"].replace("view):", "view)"))
    assert page.text("error").startswith("your policy, line 4:") and page.page.is_visible("#error")
    assert page.decodes() == before, "the last good run stays"
    page.type("source", POLICIES["ShortestFirst"])
    assert not page.page.is_visible("#error")
    page.type("text", '{"requests": [}')
    assert page.text("error").startswith("workload, line 1, column 15")
    page.type(
        "source", "class Endless(SchedulingPolicy):\n    def waiting_order(self, view):\n        return view.waiting"
    )
    workload = PRESETS["chunked"].workload
    page.type("text", json.dumps(workload))
    assert page.decodes() == decodes_of(simulate(workload))
    page.page.evaluate(
        "() => { const area = document.getElementById('source'); area.value = "
        "'class Endless(SchedulingPolicy):\\n    def waiting_order(self, view):\\n        while True: pass'; "
        "area.dispatchEvent(new Event('input')); }"
    )
    page.page.wait_for_selector("#cancel:not([hidden])", timeout=PATIENCE)
    page.page.click("#cancel")
    page.page.wait_for_function("() => document.getElementById('error').textContent.includes('cancelled')")
    page.page.wait_for_function("() => document.getElementById('status').textContent === ''", timeout=PATIENCE)
    page.page.select_option("#policy", "")
    page.settle()
    assert page.decodes() == decodes_of(simulate(workload))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_change_takes_the_place_of_a_run_that_does_not_end(open_playground, pinned):
    page, workload = open_playground(), PRESETS["own-policy"].workload
    page.page.select_option("#preset", "own-policy")
    page.page.select_option("#policy", "")
    page.settle()
    if pinned:
        page.page.click("#pin")
        page.settle()
    write = """(code) => {
      const area = document.getElementById("source");
      area.value = code;
      area.dispatchEvent(new Event("input"));
    }"""
    page.page.select_option("#policy", "own")
    code = POLICIES["ShortestFirst"].replace("ShortestFirst", "Mine")
    page.page.evaluate(write, code.replace("return sorted", "while True: pass\n        return sorted"))
    page.page.wait_for_selector("#cancel:not([hidden])", timeout=PATIENCE)
    page.page.evaluate(write, code)
    names = {}
    exec(f"from workbench.scheduler.policy import SchedulingPolicy\n{code}", names)
    expected = decodes_of(simulate(workload, policy=names["Mine"]()))
    end = time.monotonic() + PATIENCE / 1000
    while page.decodes() != expected and time.monotonic() < end:
        time.sleep(0.2)
    page.settle()
    assert page.decodes() == expected != decodes_of(simulate(workload))
    assert not pinned or page.decodes("other") == decodes_of(simulate(workload))
    assert not page.page.is_visible("#error") and page.text("status") != "Loading Python…"


def test_a_refused_setting_says_why_on_a_phone_and_cannot_be_pinned(open_playground):
    page = open_playground()
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.page.click("#fold > summary")
    page.page.select_option("#policy", "own")
    page.type("source", "class Mine(SchedulingPolicy):\n    def waiting_order(self, view):\n        return 1 +")
    box = page.page.locator("#error").bounding_box()
    assert "your policy, line 3" in page.text("error")
    assert box["y"] >= 0 and box["y"] + box["height"] <= 844, "the place of the numbers is in sight"
    assert not page.page.is_visible("#numbers"), "they are those of another run"
    page.page.click("#pin")
    assert page.text("status") == "There is no run to pin." and page.text("pin") == "Pin this run as A"
    page.page.select_option("#preset", "fleet")
    page.settle()
    assert not page.page.is_visible("#error") and not page.page.is_visible("#own"), "a fleet has vLLM's rules alone"
    assert page.page.is_visible("#numbers") and len(page.page.query_selector_all("#rows figure")) == 1


def test_a_duel_runs_b_when_the_bet_is_made(open_playground):
    page = open_playground()
    assert page.page.is_hidden("#duel")
    page.page.click("#pin")
    page.settle()
    page.page.click("#duel")
    assert page.page.is_visible("#bets")
    before = page.decodes()
    page.page.check("#bets input[value=A]")
    page.page.click("#bets button")
    assert "B is the same as A" in page.text("error")
    page.slide("max_num_batched_tokens", 16, settles=False)
    page.page.select_option("#policy", "ShortestFirst")
    assert page.decodes() == before and page.text("status") == "B waits for your bet"
    assert page.page.is_hidden("#error"), "B is another one now"
    page.page.select_option("#measure", "time until all are finished")
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('verdict').textContent.includes('Right so far')")
    assert page.page.is_hidden("#bets") and page.decodes() != before
    said = page.text("verdict")
    assert said.startswith("Time until all are finished: A ") and "You bet on A: you were right." in said
    assert said.endswith("Right so far: 1 of 1.")
    after = page.decodes()
    page.page.click("#duel")
    assert page.page.is_hidden("#verdict"), "the answer is above the bet"
    page.page.wait_for_function("() => document.querySelectorAll('#numbers tbody tr').length === 1")
    assert page.decodes() == before and page.store(which="other") is None, "and so is its picture"
    page.page.click("#duel")  # no bet
    page.settle()
    assert page.page.is_hidden("#bets") and page.decodes() == after and page.decodes("other") == before
    page.page.click("#duel")
    page.page.check("#bets input[value=B]")
    page.page.select_option("#policy", "")
    assert page.text("status") == "B waits for your bet" and page.page.is_hidden("#verdict")
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('verdict').textContent.endsWith('1 of 2.')")
    assert "you were wrong" in page.text("verdict")
    page.type("text", '{"requests": [}')  # a setting that cannot run leaves no verdict of another one
    assert page.text("error") and page.page.is_hidden("#verdict")


ROWS = "(rows) => rows.map((row) => row.cells[0].textContent)"


def test_an_earlier_b_is_taken_away_until_the_bet_is_made(open_playground):
    page = open_playground("#preset=bursts")
    pinned = page.decodes()
    page.page.click("#pin")
    page.settle()
    page.slide("max_num_seqs", 4)
    page.page.wait_for_function("() => document.querySelectorAll('#numbers tbody tr').length === 2")
    page.page.click("#duel")
    page.page.wait_for_function("() => document.querySelectorAll('#numbers tbody tr').length === 1")
    assert page.text("status") == "B waits for your bet" and page.decodes() == pinned
    page.slide("max_num_seqs", 32, settles=False)
    assert page.text("status") == "B waits for your bet"
    assert page.page.eval_on_selector_all("#numbers tbody tr", ROWS) == ["A"]
    assert page.decodes() == pinned and page.store(which="other") is None
    page.page.check("#bets input[value=A]")
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('verdict').textContent.includes('Right so far')")
    expected = simulate(PRESETS["bursts"].workload, config={"max_num_seqs": 32})
    assert page.decodes() == decodes_of(expected) and page.decodes("other") == pinned


def test_a_b_that_cannot_run_leaves_the_bets_open(open_playground):
    page = open_playground("#preset=documents")
    assert re.fullmatch(r"simulated in \d+ ms", page.text("status"))
    page.page.click("#pin")
    page.settle()
    before = page.decodes()
    page.page.click("#duel")
    page.slide("num_blocks", 16, settles=False)
    page.page.select_option("#measure", "time until all are finished")
    page.page.check("#bets input[value=neither]")
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('error').textContent.includes('num_blocks')")
    page.settle()
    assert page.page.is_visible("#bets") and page.page.is_visible("#error") and page.page.is_hidden("#verdict")
    assert page.page.is_checked("#bets input[value=neither]")
    assert page.page.input_value("#measure") == "time until all are finished"
    page.slide("num_blocks", 256, settles=False)
    assert page.page.is_visible("#bets") and page.text("status") == "B waits for your bet"
    assert page.page.is_hidden("#error") and page.decodes() == before, "nothing runs before the bet"
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('verdict').textContent.includes('Right so far')")
    assert page.page.is_hidden("#bets")


def test_a_duel_in_steps_offers_what_can_settle_it(open_playground):
    page = open_playground()
    workload = {name: value for name, value in PRESETS["chunked"].workload.items() if name != "cost_model"}
    page.type("text", json.dumps(workload))
    page.page.click("#pin")
    page.settle()
    page.page.click("#duel")
    offered = "(options) => options.map((option) => option.value)"
    assert len(page.page.eval_on_selector_all("#measure option", offered)) == 7
    assert page.text("in-steps").startswith("Steps count, not seconds")
    page.slide("max_num_batched_tokens", 32, settles=False)
    assert page.page.eval_on_selector_all("#measure option", offered) == ["hit rate of prompt tokens"]
    assert "give the workload a cost model" in page.text("in-steps") and page.page.is_visible("#in-steps")
    page.page.check("#bets input[value=neither]")
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('verdict').textContent.includes('Right so far')")
    page.page.evaluate("() => playground.ask({ command: 'settle', measure: 'mean time to first token' })")
    assert "give both runs times" in page.text("error")
    assert page.page.evaluate("() => !document.body.classList.contains('outdated')"), "B has run"


def test_a_pinned_run_of_another_workload_is_not_compared(open_playground):
    page = open_playground()
    page.page.click("#pin")
    page.settle()
    page.page.select_option("#preset", "bursts")
    page.settle()
    assert page.text("verdict").startswith("A belongs to another workload") and page.page.is_hidden("#duel")
    assert page.decodes() == decodes_of(simulate(PRESETS["bursts"].workload)) and page.store(which="other") is None
    assert page.page.eval_on_selector_all("#numbers tbody tr", ROWS) == ["now"]


@pytest.mark.parametrize("preset, column", [("preemption", "preempted"), ("prefix-caching", "cached")])
def test_a_preset_opens_at_what_it_is_about_and_stays_when_a_slider_moves(open_playground, preset, column):
    page = open_playground()
    page.page.select_option("#preset", preset)
    page.settle()
    view = "document.getElementById('view').shadowRoot.querySelector('.wb-root').workbench"
    step, words = page.page.evaluate(f"() => [{view}.cursor.step, {view}.store.sentences[{view}.cursor.step]]")
    trace = simulate(PRESETS[preset].workload)
    found = {
        "preempted": lambda record: record.preempted,
        "cached": lambda record: any(chunk.num_cached_tokens for chunk in record.chunks),
    }[column]
    assert step == next(record.step for record in trace if found(record)), words
    page.page.evaluate(f"() => {view}.cursor.seek(3)")
    page.slide("max_num_batched_tokens", 64)
    assert page.page.evaluate(f"() => {view}.cursor.step") == 3
    page.page.click("#why summary")
    page.page.wait_for_function("() => document.getElementById('explanation').textContent")
    times = simulate(PRESETS[preset].workload, config={"max_num_batched_tokens": 64}).metrics().requests
    slowest = max(times, key=lambda name: times[name].e2e.seconds)
    assert page.page.input_value("#request") == slowest and slowest in page.text("explanation")


@pytest.mark.parametrize("width", [1100, 1280, 1440])
def test_the_buttons_of_a_panel_share_the_line_of_its_title(open_playground, width):
    page = open_playground(viewport={"width": width, "height": 900})
    below = page.page.evaluate(
        """() => [...document.getElementById("view").shadowRoot.querySelectorAll(".wb-panel > header")]
            .filter((e) => e.offsetParent).map((e) => {
                const { bottom } = e.querySelector("h3").getBoundingClientRect();
                const buttons = [...e.querySelectorAll("button")].filter((each) => each.offsetWidth);
                const beside = buttons.map((each) => each.getBoundingClientRect().top < bottom);
                return [e.parentElement.dataset.panel, ...beside];
            })"""
    )
    assert "pool" in [name for name, *_ in below] and all(all(same) for _, *same in below), below


def test_a_bet_on_a_phone_shows_the_settings_of_b(open_playground):
    page = open_playground(viewport={"width": 390, "height": 800})
    page.page.click("#pin")
    page.settle()
    assert page.page.is_hidden("#sliders")
    page.page.click("#duel")
    assert page.page.is_visible("#sliders") and page.page.is_visible("#policy")
    page.page.wait_for_function(
        "() => { const [bets, numbers] = ['bets', 'numbers'].map((id) => document.getElementById(id)); "
        "const box = bets.getBoundingClientRect(), { top } = numbers.getBoundingClientRect(); "
        "return box.top >= 0 && box.bottom <= Math.min(top, innerHeight); }"  # the numbers cover the lower edge
    )


def test_two_routers_duel(open_playground):
    page = open_playground("#preset=fleet")
    assert page.page.input_value("#replicas") == "4" and page.page.is_visible("#fleet")
    page.page.click("#pin")
    page.settle()
    page.page.click("#duel")
    page.page.select_option("#router", "sticky")
    assert page.text("status") == "B waits for your bet"
    page.page.select_option("#measure", "hit rate of prompt tokens")
    page.page.check("#bets input[value=B]")
    page.page.click("#bets button")
    page.page.wait_for_function("() => document.getElementById('verdict').textContent.includes('Right so far')")
    workload = PRESETS["fleet"].workload
    a, b = (simulate_fleet(workload, replicas=4, router=router).traces for router in ("round_robin", "sticky"))
    _, told = outcome(a, b, "hit rate of prompt tokens")
    assert page.text("verdict") == f"{told} You bet on B: you were right. Right so far: 1 of 1."
    figures = page.page.query_selector_all("#rows figure")
    assert [figure.query_selector("figcaption").text_content() for figure in figures] == [
        "A: 4 replicas, round_robin",
        "B: 4 replicas, sticky",
    ]
    left, right = (figure.bounding_box() for figure in figures)
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"], "side by side"
    for replica in (0, 3):
        page.page.select_option("#replica", str(replica))
        page.settle()
        assert page.decodes() == decodes_of(b[replica])
    link = page.page.evaluate("async () => { await playground.share(); return location.hash; }")
    other = open_playground(link)
    assert other.page.input_value("#router") == "sticky" and other.text("verdict").startswith("mean time to first")
    other.page.click("#pin")
    other.settle()
    other.page.eval_on_selector("#replicas", "(e) => { e.value = 1; e.dispatchEvent(new Event('input')); }")
    other.settle()
    assert other.page.is_hidden("#fleet") and other.page.is_disabled("#router")
    assert other.decodes() == decodes_of(simulate(workload))


@pytest.mark.repeats(of="test_axe_has_no_serious_finding")
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_state_of_the_page_has_a_serious_finding(axe_findings, open_playground, dark, width):
    page = open_playground(
        viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light", bypass_csp=True
    )
    assert axe_findings(page.page) == []
    if width < 821:
        page.page.click("#fold > summary")
    page.page.click("#as-text summary")
    page.page.select_option("#policy", "ShortestFirst")
    page.settle()
    page.page.click("#pin")
    page.settle()
    page.slide("max_num_batched_tokens", 64)
    page.page.click("#why summary")
    page.settle()
    page.page.click("#duel")
    assert axe_findings(page.page) == [], "with the bets of a duel"
    assert page.page.evaluate("document.scrollingElement.scrollWidth") <= width
    page.page.click("#duel")
    page.settle()
    assert axe_findings(page.page) == []
    page.type("text", "{")
    assert axe_findings(page.page) == [], "with an error"
    page.page.select_option("#preset", "fleet")
    page.page.select_option("#policy", "")
    page.settle()
    assert axe_findings(page.page) == [], "with the rows of a fleet"
    assert page.page.evaluate("document.scrollingElement.scrollWidth") <= width
    page.page.click("#python")
    page.page.wait_for_selector("#cell[open]")
    assert axe_findings(page.page) == [], "with the cell"


@pytest.mark.repeats(of="test_every_preset_slider_switch_and_policy")
def test_a_narrow_page_and_arrivals_drawn_by_hand(open_playground):
    page = open_playground(viewport={"width": 390, "height": 800}, has_touch=True)
    assert page.page.evaluate("document.scrollingElement.scrollWidth") <= 390
    picture = page.page.locator("canvas:visible").first.bounding_box()
    assert picture["y"] + picture["height"] <= page.page.locator("#numbers").bounding_box()["y"], (
        "the timeline is in sight"
    )
    columns = page.page.eval_on_selector_all("#numbers thead th", "(all) => all.map((each) => each.innerText)")
    assert columns[:3] == ["first token, mean", "P99", "output tokens/s"]
    third = page.page.locator("#numbers thead th").nth(2).bounding_box()
    assert third["x"] + third["width"] <= 390, "mean, P99 and throughput need no scrolling"
    assert page.page.is_hidden("#sliders")
    page.page.focus("#fold > summary")
    page.page.keyboard.press("Enter")
    assert page.page.is_visible("#sliders")
    for _ in range(2):  # at the sliders, and at the end of the page
        numbers = page.page.locator("#numbers").bounding_box()
        assert numbers["y"] > 400 and numbers["y"] + numbers["height"] <= 800, "what a slider changes is in sight"
        page.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.page.evaluate("scrollTo(0, 0)")
    page.page.evaluate("document.body.classList.add('embedded')")
    assert page.page.is_visible("#sliders") and page.page.is_hidden("#fleet-settings"), (
        "the page of a concept is about one"
    )
    page.page.evaluate("document.body.classList.remove('embedded')")
    page.page.set_viewport_size({"width": 1000, "height": 800})
    assert page.page.is_hidden("#fold > summary") and page.page.is_visible("#sliders"), (
        "nothing is folded on a wide page"
    )
    page.page.set_viewport_size({"width": 390, "height": 800})
    page.page.wait_for_function("() => !document.getElementById('fold').open")
    page.page.click("#fold > summary")
    number = page.store("store.requests.length")
    page.page.locator("#drawing").click(position={"x": 200, "y": 60})
    page.settle()
    assert page.store("store.requests.length") == number + 1
    added = json.loads(page.page.input_value("#text"))["requests"][-1]
    assert added["id"] == f"new{number}" and added["arrival_time"] > 0 and added["prompt"]["len"] > 1
    page.page.locator("#drawing").press("ArrowUp")
    page.settle()
    grown = json.loads(page.page.input_value("#text"))["requests"][-1]
    assert grown["prompt"]["len"] > added["prompt"]["len"] == added["prompt"]["len"]
    page.page.locator("#drawing").press("Delete")
    page.settle()
    assert page.store("store.requests.length") == number
    page.page.click("#python")
    page.page.wait_for_selector("#cell[open]", timeout=PATIENCE)
    assert "trace = simulate(workload)" in page.text("cell-text")
    page.page.click("#close-cell")


def states_of(page):
    """Bring the page into its states one after another, and yield their names."""
    yield "as it opens"
    page.page.click("#pin")
    page.slide("max_num_batched_tokens", 32)
    yield "a comparison"
    page.page.click("#pin")
    page.settle()
    page.page.click("#why summary")
    page.page.select_option("#request", index=1)
    page.settle()
    yield "why"
    page.page.select_option("#preset", "own-policy")
    page.settle()
    yield "a policy"


@pytest.mark.repeats(of="test_tab_reaches_every_control_of_a_view")
def test_tab_reaches_every_control(open_playground):
    page = open_playground()
    for state in states_of(page):
        page.page.evaluate("() => document.activeElement.blur()")
        assert unreached(page.page) == [], state


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_serious_finding(axe_findings, open_playground, scheme):
    page = open_playground(color_scheme=scheme)
    for state in states_of(page):
        assert axe_findings(page.page) == [], state


COLUMNS = (
    "Object.fromEntries([...store.columns].map(([name, column]) => "
    "[name, [...column.data.subarray(0, column.length)].map(String).join()]))"
)


def test_a_link_opens_a_run_at_its_step_as_a_saved_page_shows_it(open_playground, browser, tmp_path):
    trace = random_trace(11)
    step, request = trace[len(trace) // 2].step, list(trace.requests)[1]
    link = trace.to_link(step=step, request_id=request)
    page = open_playground(link[link.index("#") :])
    assert page.text("recording-name").startswith(f"the run of the link: {len(trace)} steps")
    view = "document.getElementById('view').shadowRoot.querySelector('.wb-root').workbench"
    assert page.page.evaluate(f"() => {view}.store.label({view}.cursor.step)") == step
    assert page.page.evaluate(f"() => {view}.store.requests[{view}.cursor.selected].id") == request
    card = f"() => [{view}.inspector.element.hidden, {view}.inspector.title.textContent]"
    page.page.wait_for_function(f"() => !{view}.inspector.element.hidden")
    assert page.page.evaluate(card) == [False, request], "as on a saved page"
    assert page.page.locator("#request").input_value() == request, "the one to be explained"
    trace.to_html(tmp_path / "run.html")
    saved = browser.new_page()
    saved.goto((tmp_path / "run.html").as_uri())
    saved.wait_for_function("() => document.querySelector('.wb-root')?.workbench?.store.numSteps > 0")
    columns = saved.evaluate(
        f"() => {{ const store = document.querySelector('.wb-root').workbench.store; return {COLUMNS}; }}"
    )
    assert page.store(COLUMNS) == columns and len(columns) > 10
    saved.close()
    page.page.reload()
    page.settle()
    assert page.store(COLUMNS) == columns
    page.slide("max_num_seqs", 1)  # what if: a fork of the linked run
    assert page.decodes("other") != page.decodes()


@pytest.mark.parametrize("damage", ["cut", "letters", "bomb"])
def test_a_damaged_link_says_so_and_the_page_works(open_playground, damage):
    link = random_trace(11).to_link()
    fragment = link[link.index("#") :]
    packer = zlib.compressobj(9, wbits=-15)
    bomb = packer.compress(bytes(80 * 2**20)) + packer.flush()
    damaged = {
        "cut": fragment[: len(fragment) // 2],
        "letters": "#run=%FF%FE!!",
        "bomb": "#run=" + base64.urlsafe_b64encode(bomb).decode().rstrip("="),
    }
    page = open_playground(damaged[damage])
    words = page.text("error")
    assert "cannot be read" in words and ("64 MB" in words) == (damage == "bomb")
    assert page.decodes() == decodes_of(simulate(PRESETS["chunked"].workload))


def test_a_link_to_a_part_says_so_and_offers_no_other_settings(open_playground):
    trace = random_trace(3)
    page = open_playground("#" + trace[2:6].to_link().partition("#")[2])
    controls = page.page.locator("#changes input, #changes select")
    assert page.decodes() == decodes_of(trace[2:6])
    assert "This is a part of a longer run." in page.text("numbers")
    assert "runs from step 0" in page.text("recording-hint") and "steps 2 to 5" in page.text("recording-hint")
    assert controls.count() > 5 and all(control.is_disabled() for control in controls.all())
    page.page.click("#close-recording")
    page.settle()
    assert page.page.get_by_role("slider", name="Token budget").is_enabled() and "part of" not in page.text("numbers")


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_page_takes_the_theme_that_its_dashboard_is_given(open_playground, system):
    page = open_playground(color_scheme=system)

    def colours():
        return page.page.evaluate(
            "() => [document.body, document.getElementById('view').shadowRoot.querySelector('.wb-root')]"
            ".map((element) => getComputedStyle(element).backgroundColor).map((colour) => "
            "colour.match(/\\d+/g).slice(0, 3).reduce((sum, one) => sum + Number(one), 0) < 380 ? 'dark' : 'light')"
        )

    button = page.page.get_by_role("button", name="Switch between light and dark")
    other = {"light": "dark", "dark": "light"}[system]
    assert colours() == [system] * 2
    for expected in (other, system):
        button.click()
        assert colours() == [expected] * 2


def test_a_link_to_settings_keeps_the_step_at_the_cursor(open_playground):
    page = open_playground("#preset=bursts&max_num_seqs=4")
    view = "document.getElementById('view').shadowRoot.querySelector('.wb-root').workbench"
    page.page.evaluate(f"() => {view}.cursor.seek(37)")
    page.page.wait_for_function("() => playground.place?.step === 37")
    before = page.page.evaluate("() => playground.shared")
    page.page.click("#link")
    page.page.wait_for_function("(before) => playground.shared !== before", arg=before)
    link = page.page.evaluate("() => location.hash")
    assert len(link) < 300
    other = open_playground(link)
    assert other.decodes() == page.decodes()
    other.page.wait_for_function(f"() => {view}.cursor.step === 37")


def test_a_link_to_a_fleet_keeps_the_replica_on_display(open_playground):
    page = open_playground("#preset=fleet")
    traces = simulate_fleet(PRESETS["fleet"].workload, replicas=4, router="round_robin").traces
    busiest = int(page.page.input_value("#replica"))
    chosen = next(
        i for i, trace in enumerate(traces) if i != busiest and decodes_of(trace) != decodes_of(traces[busiest])
    )
    page.page.select_option("#replica", str(chosen))
    page.settle()
    before = page.page.evaluate("() => playground.shared")
    page.page.click("#link")
    page.page.wait_for_function("(before) => playground.shared !== before", arg=before)
    other = open_playground(page.page.evaluate("() => location.hash"))
    for _ in range(2):
        assert other.page.input_value("#replica") == str(chosen) and other.decodes() == decodes_of(traces[chosen])
        other.page.reload()
        other.settle()


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("#preset=chunkd", 'The link names a preset "chunkd", which does not exist: did you mean "chunked"?'),
        ("#preset=zzzzzzzz", 'The link names a preset "zzzzzzzz", which does not exist: there are '),
        ("#preset=fleet&router=stiky", 'The link names a router "stiky", which does not exist: did you mean "sticky"?'),
    ],
)
def test_a_link_that_names_what_does_not_exist_says_so(open_playground, link, words):
    page = open_playground(link)
    assert page.page.is_visible("#error") and page.text("error").startswith(words)
    assert page.page.input_value("#preset") == ("fleet" if "fleet" in link else "chunked")
    assert page.page.is_hidden("#error") is False and page.decodes()
    right = open_playground("#preset=bursts")
    assert right.page.is_hidden("#error")


@pytest.mark.parametrize(
    "place",
    [
        {"step": "x"},
        {"step": -4, "request": 7},
        {"step": 1e9, "request": "none"},
        "x",
        {"step": 3, "replica": "length"},
    ],
)
def test_a_link_to_a_place_that_is_none_leaves_the_cursor_on_a_step(open_playground, place):
    page = open_playground()
    link = page.page.evaluate("async (at) => (await import('./link.js')).encodeState({ preset: 'bursts', at })", place)
    other = open_playground(f"#{link}")
    view = "document.getElementById('view').shadowRoot.querySelector('.wb-root').workbench"
    step, last = other.page.evaluate(f"() => [{view}.cursor.step, {view}.cursor.last]")
    assert isinstance(step, int) and 0 <= step <= last
    assert other.decodes() == decodes_of(simulate(PRESETS["bursts"].workload))
