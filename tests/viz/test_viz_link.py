"""Links that hold a run: what is in them, what is refused, and the command of a view that makes them."""

import base64
import json
import random
import zlib
from urllib.parse import parse_qs, urlsplit

import pytest
from serve_helpers import wait_for
from viz_traces import ReplayingController, hostile_trace, random_trace

from workbench import simulate
from workbench.apps.cli import main
from workbench.apps.playground.session import Session
from workbench.trace import Trace, TraceMeta
from workbench.viz.classroom import Classroom
from workbench.viz.feed import Feed
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import decode_packet, encode_packet
from workbench.viz.link import LOCAL_PLAYGROUND, MAX_CHARACTERS, link_to


def read_link(link, folder):
    """The place and the trace of a link, read without the code that writes it."""
    given = parse_qs(urlsplit(link).fragment)
    packed = given.pop("run")[0]
    lines = zlib.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), -15)
    (folder / "linked.jsonl").write_bytes(lines)
    return {name: values[0] for name, values in given.items()}, Trace.load(folder / "linked.jsonl")


@pytest.mark.parametrize("seed", range(8))
def test_a_link_holds_the_whole_run_and_its_place(tmp_path, seed):
    random_trace(seed).save(tmp_path / "run.jsonl")
    trace = Trace.load(tmp_path / "run.jsonl")
    request = random.Random(seed).choice(list(trace.requests))
    place, linked = read_link(trace.to_link(step=trace[len(trace) // 2].step, request_id=request), tmp_path)
    assert place == {"step": str(trace[len(trace) // 2].step), "request": request}
    assert linked.to_dict() == trace.to_dict()
    answer = Session().handle(json.dumps({"command": "open", "name": "x"}), (tmp_path / "linked.jsonl").read_bytes())
    (_, arrays), (_, expected) = (decode_packet(each) for each in (answer.packet, encode_packet(columns_of(trace))))
    assert arrays.keys() == expected.keys()
    assert all(arrays[name].tobytes() == expected[name].tobytes() for name in arrays)


def test_hostile_names_survive_a_link(tmp_path):
    trace = hostile_trace()
    for request in trace.requests:
        place, linked = read_link(link_to(trace, request_id=request), tmp_path)
        assert place == {"request": request} and linked.to_dict() == trace.to_dict()


def test_a_part_of_a_run_is_a_run(tmp_path):
    trace = random_trace(3)
    part = trace[2:5]
    place, linked = read_link(part.to_link(step=3), tmp_path)
    assert place == {"step": "3"} and [record.step for record in linked] == [2, 3, 4]


def test_the_address_of_the_playground(monkeypatch):
    trace = random_trace(1)
    monkeypatch.delenv("WORKBENCH_PLAYGROUND", raising=False)
    assert link_to(trace).startswith(f"{LOCAL_PLAYGROUND}#run=")
    monkeypatch.setenv("WORKBENCH_PLAYGROUND", "https://example.org/play/?theme=dark#old")
    assert link_to(trace).startswith("https://example.org/play/?theme=dark#run=")
    assert link_to(trace, playground="http://[::1]:9/p/").startswith("http://[::1]:9/p/#run=")


def test_what_cannot_be_linked_is_refused_by_name():
    trace = random_trace(2)
    with pytest.raises(ValueError, match="no steps yet"):
        link_to(Trace(TraceMeta(source="test")))
    for step in (-1, trace[-1].step + 1):
        with pytest.raises(ValueError, match=f"step must be from 0 to {trace[-1].step}, got {step}"):
            link_to(trace, step=step)
    with pytest.raises(ValueError, match="no request 'nobody'; it has "):
        link_to(trace, request_id="nobody")
    for address in ("javascript:alert(1)", "file:///tmp/x", "example.org", "http://"):
        with pytest.raises(ValueError, match="playground must be an http or https address"):
            link_to(trace, playground=address)


def test_a_run_that_is_too_long_offers_the_file_and_its_parts_fit():
    requests = [
        {"id": f"r{i}", "prompt": [random.Random(i).randrange(9999) for _ in range(900)], "max_tokens": 60}
        for i in range(120)
    ]
    trace = simulate({"config": {"num_blocks": 9000}, "requests": requests})
    with pytest.raises(ValueError, match=f"limit is {MAX_CHARACTERS:,}: send a page .Save HTML, trace.to_html."):
        link_to(trace)
    assert len(link_to(trace[-3:])) <= MAX_CHARACTERS


def test_a_part_of_a_run_in_a_large_pool_fits_and_older_links_open(tmp_path):
    """The free queue of a used pool is in the link as runs; a link that names each free block is read as before."""
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"len": 300 + 7 * i, "seed": f"s{i}"},
            "max_tokens": 5 + i % 9,
            "arrival_step": i // 8,
        }
        for i in range(120)
    ]
    trace = simulate({"config": {"num_blocks": 40_000, "max_num_batched_tokens": 4096}, "requests": requests})
    at = len(trace) - 2
    queue = [int(block) for block in trace.pool_state(at - 1, "end").free_queue]
    assert len(queue) > 35_000 and queue != sorted(queue)
    link = link_to(trace[at : at + 2])
    assert len(link) < 20_000
    _, linked = read_link(link, tmp_path)
    assert list(linked.keyframe.free_block_ids) == queue
    lines = (tmp_path / "linked.jsonl").read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if '"keyframe"' in line)
    written = json.loads(lines[place])
    assert len(written["free_block_ids"]) < len(queue) / 20
    lines[place] = json.dumps(written | {"free_block_ids": queue})
    (tmp_path / "older.jsonl").write_text("\n".join(lines) + "\n")
    assert Trace.load(tmp_path / "older.jsonl").keyframe == linked.keyframe == trace[at:].keyframe


def test_a_step_that_does_not_fit_is_one_step(monkeypatch):
    monkeypatch.setattr("workbench.viz.link.MAX_CHARACTERS", 50)
    with pytest.raises(ValueError, match=r"a link to 1 step would have .* or the trace file$"):
        link_to(random_trace(2)[-1:])
    with pytest.raises(ValueError, match=r"a link to 2 steps would have .*, or link to fewer steps$"):
        link_to(random_trace(2)[-2:])


def test_a_view_sends_the_link_and_a_problem_as_its_message():
    trace = random_trace(4)
    feed = Feed(ReplayingController(trace))
    while feed.controller.step():
        pass
    feed.handle({"id": 1, "name": "link", "args": {"step": trace[0].step, "request": next(iter(trace.requests))}})
    wait_for(lambda: feed._download is not None)
    name, link = feed._download.decode().split("\n")
    linked = link_to(feed.controller.trace, step=trace[0].step, request_id=next(iter(trace.requests)))
    assert name == "link" and link == linked
    feed.handle({"id": 2, "name": "link", "args": {"step": 10**6}})
    wait_for(lambda: feed.status()["message"])
    assert "step must be from" in feed.status()["message"]


CARDS = (
    None,
    {"kind": "request", "request": 2},
    {"kind": "token", "request": 1, "number": 0},
    {"kind": "block", "block": 3},
)


@pytest.mark.parametrize("selected", [None, 0])
@pytest.mark.parametrize("card", CARDS)
def test_a_link_and_a_saved_page_have_the_request_that_one_looks_at(deno_page, card, selected):
    """The open card comes before the selected request; a card without a request names none."""
    trace = random_trace(4)
    names = list(trace.requests)
    deno_page.open(trace)
    deno_page("view.cursor.selected = argument", selected)
    deno_page("view.inspector.pin(argument)", card)
    index = (card or {}).get("request", selected)
    wanted = None if index is None else names[index]
    deno_page("view.linkBox.ask(null)")
    deno_page("view.place.savePage()")
    link, saved = deno_page("page.sent.slice(-2)")
    assert (link["name"], link["args"]["request"]) == ("link", wanted)
    place = saved["args"]["place"]
    assert (saved["name"], place["request"]) == ("save_html", wanted)
    assert place["card"] == (card is not None and card["kind"] == "request")


def test_the_command_line_prints_the_link(tmp_path, capsys):
    trace = random_trace(5)
    trace.save(tmp_path / "run.jsonl")
    file = str(tmp_path / "run.jsonl")
    assert main(["trace", "link", file, "--step", "1", "--playground", "https://a.example/"]) == 0
    assert capsys.readouterr().out.strip() == link_to(trace, step=1, playground="https://a.example/")
    assert main(["trace", "link", file, "--step", "999"]) == 2
    assert "step must be from 0" in capsys.readouterr().err


def test_a_follower_of_a_class_may_have_a_link():
    room, controller = Classroom(), ReplayingController(random_trace(4))
    while controller.step():
        pass
    teacher, follower = feeds = [Feed(controller, room=room) for _ in range(2)]
    for feed, role in zip(feeds, ("teacher", "follower"), strict=True):
        feed.confirm()
        feed.handle({"name": "class", "args": {"what": "join", "role": role, "key": room.key}})
    follower.handle({"name": "link", "args": {}})
    wait_for(lambda: follower._download or follower.status()["message"])
    assert follower._download.startswith(b"link\nhttp") and teacher._download is None
