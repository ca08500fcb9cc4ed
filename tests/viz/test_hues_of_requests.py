"""Hues of requests: a function of the record that never changes as the run grows, and no two alike in a step."""

from base64 import b64encode

import pytest
from painted import hues_of
from runs_to_draw import run

from workbench import simulate
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import encode_packet, trace_facts

HUES = "Object.fromEntries(view.store.requests.map((r) => [r.id, view.theme.hue(r.index)]).filter(([, hue]) => hue))"


def packet(trace, first, last):
    columns = columns_of(trace)
    return b64encode(encode_packet(columns, first, last, extra={"facts": trace_facts(trace)})).decode()


@pytest.mark.parametrize("name", ["many 0", "long", "timed 3", "idle", "crowd"])
def test_running_requests_have_hues_and_none_changes(deno_page, name):
    trace, _ = run(name)
    records, size = list(trace), max(1, len(trace) // 12)
    deno_page("page.open(argument)", {"packet": packet(trace, 0, 1), "status": {"live": True}})
    before = {}
    for last in [*range(1, len(trace), size), len(trace)]:
        deno_page("view.receive(page.bytes(argument))", packet(trace, 0, last))
        found = deno_page(HUES)
        assert found == hues_of(records[:last])
        assert before.items() <= found.items(), "a hue that was given stays"
        before = found
    assert deno_page.open(trace)(HUES) == before, "the saved page of the run has the hues of the live one"
    assert len(before) > 6, "hues are given again"
    for record in records:
        given = [before[chunk.request_id] for chunk in record.chunks if chunk.request_id in before]
        assert len(given) == len(set(given)), "two requests of a step have one hue"


def test_a_second_run_has_hues(deno_page):
    trace, _ = run("long")
    last = [chunk.request_id for chunk in trace[-1].chunks]
    assert set(last) <= deno_page.open(trace)(HUES).keys()
    assert last[0] not in list(trace.requests)[:6]


def test_a_chosen_request_gets_a_hue_that_none_beside_it_has(deno_page):
    requests = [{"id": f"r{i}", "prompt": {"len": 9}, "max_tokens": 5} for i in range(8)]
    trace = simulate({"requests": requests})
    deno_page.open(trace)
    ids = list(trace.requests)
    assert ids[7] not in deno_page(HUES)
    toggle = "view.toggleFocus(view.store.byId.get(argument))"
    deno_page(toggle, ids[7])
    assert ids[7] not in deno_page(HUES), "all six hues run beside it"
    assert "Take one of them out of focus" in deno_page("view.status.message")
    before = deno_page(HUES)[ids[0]]
    deno_page(toggle, ids[0])
    deno_page(toggle, ids[7])
    assert deno_page(HUES)[ids[7]] == before
