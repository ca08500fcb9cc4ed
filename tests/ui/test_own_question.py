"""A visitor's own question: it and its reply stand above the pictures, with its way through the engine beside them."""

import itertools
import statistics

import pytest

from workbench import Engine, EngineConfig

QUESTION = "w7 " * 30


@pytest.fixture
def engine(tiny_llama):
    config = EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=128)
    with Engine(tiny_llama, config) as engine:
        engine.add_request(list(range(5, 77)), request_id="long", max_tokens=20)
        engine.step()
        yield engine


def ask(page, question):
    box = page.root.get_by_role("textbox", name="Prompt")
    box.fill(question)
    box.press("Enter")
    own = page.root.get_by_role("region", name="Your question")
    own.wait_for()
    return own


def facts(own):
    names, values = (own.locator(f".wb-pinned {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def test_a_question_has_its_reply_and_its_way_through_the_engine_beside_it(open_page, serve, engine):
    page = open_page(serve(engine).rstrip("/") + "/#story", width=1440, height=900)
    page.wait("view.store.numSteps === 1 && view.status.state === 'paused'")
    own = ask(page, QUESTION)
    page.wait("view.question.queued.length === 1")
    page.frame()
    assert own.locator(".wb-state").text_content() == "queued" and facts(own)["engine"] == "paused: Run it"
    own.get_by_role("button", name="Run it").click()
    page.wait("view.status.state === 'idle'", timeout=30_000)
    page.frame()
    request_id = page.view("view.question.id")
    assert own.locator(".wb-own-prompt").text_content() == QUESTION
    assert own.locator(".wb-own-reply").text_content() == engine.outputs[request_id].text.lstrip()

    mine = [(record, c) for record in engine.trace for c in record.chunks if c.request_id == request_id]
    before = [record for record in engine.trace if request_id in record.waiting]
    assert before, "the question waits"
    first = next(i for i, (_, chunk) in enumerate(mine) if chunk.sampled is not None)
    shown = facts(own)
    assert f"{before[0].waiting_reason}, 24 of it by long in step {before[0].step}" in shown["waited"]
    assert "the engine stood still" in shown["waited"]
    pieces = mine[: first + 1]
    assert f"30 tokens in {len(pieces)} pieces" in shown["prompt"] and len(pieces) > 1
    assert shown["prompt"].count(" in step ") == len(pieces)
    assert shown["first token"].endswith(f"in step {mine[first][0].step}")
    ends = [record.end for record, chunk in mine if chunk.sampled is not None]
    count, pace = shown["reply"].split(" tokens, one every ")
    assert int(count) == len(ends)
    seconds = statistics.median_high(b - a for a, b in itertools.pairwise(ends))
    assert float(pace.split(" ms")[0]) / 1000 == pytest.approx(seconds, rel=0.01)

    box = own.bounding_box()
    assert box["y"] + box["height"] < 450, "above the pictures, in a window of 900 pixels"
    own.get_by_role("button", name="long").click()
    page.frame()
    assert page.root.locator(".wb-drawer h3").text_content() == "long"


def test_a_reply_is_followed_while_it_grows_and_then_read_from_its_beginning(open_page, serve, engine):
    page = open_page(serve(engine).rstrip("/") + "/#story", width=1440, height=900)
    page.wait("view.store.numSteps === 1 && view.status.state === 'paused'")
    ask(page, QUESTION)
    page.wait("view.question.queued.length === 1")
    request_id = page.view("view.question.id")
    page.view("view.question.reply.style.cssText = 'max-height: 24px; width: 60px'")
    reply = (
        "(({ scrollTop, scrollHeight, clientHeight }) => [scrollTop, scrollHeight - clientHeight])(view.question.reply)"
    )
    while request_id not in engine.outputs or len(engine.outputs[request_id].token_ids) < 20:
        engine.step()
    page.wait(f"view.store.numSteps === {len(engine.trace)}")
    page.frame()
    at, below = page.view(reply)
    assert below > 24 and abs(at - below) <= 4, "the newest words are on the screen"
    engine.run(progress=False)
    page.wait(f"view.store.numSteps === {len(engine.trace)}")
    page.frame()
    at, below = page.view(reply)
    assert below > 24 and at == 0


@pytest.mark.repeats(of="test_a_question_has_its_reply_and_its_way_through_the_engine_beside_it")
def test_each_view_has_its_own_questions(open_page, serve, engine):
    address = serve(engine).rstrip("/") + "/#story"
    mine, theirs = open_page(address), open_page(address)
    own = ask(mine, "w7 w8")
    mine.wait("view.store.byId.has(view.question.id) || view.question.queued.length")
    engine.run(progress=False)
    theirs.wait(f"view.store.numSteps === {len(engine.trace)}")
    mine.wait(f"view.store.numSteps === {len(engine.trace)}")
    request_id = mine.view("view.question.id")
    assert mine.view("view.store.byId.get(argument).label", request_id) == f"you ({request_id})"
    assert theirs.view("view.store.byId.get(argument).label", request_id) == request_id
    assert not theirs.root.get_by_role("region", name="Your question").is_visible()
    mine.frame()
    own.get_by_role("button", name="Close").click()
    mine.frame()
    assert not own.is_visible()


def test_the_name_of_a_text_opens_its_request_and_keeps_its_colour(open_page, serve, engine):
    page = open_page(serve(engine).rstrip("/") + "/#story")
    page.wait("view.store.numSteps === 1")
    card = page.root.locator(".wb-card").first
    hue = page.view("view.theme.hue(0) ?? null")
    card.get_by_role("button", name="long", exact=True).click()
    page.frame()
    assert page.root.locator(".wb-drawer h3").text_content() == "long"
    assert page.view("view.theme.hue(0) ?? null") == hue
    card.get_by_role("button", name="Colour of long").click()
    assert page.view("view.theme.hue(0) ?? null") != hue
