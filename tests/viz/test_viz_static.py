"""Static pictures, the joined ES module, the notebook view and the single-file page."""

import base64
import gzip
import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from viz_traces import HOSTILE_TEXTS, IMAGE, ReplayingController, hostile_trace, pictures, random_trace

from workbench import simulate
from workbench.trace import Trace, TraceMeta
from workbench.viz import background, reprs, svg, watch, widget, words
from workbench.viz import bundle as bundling
from workbench.viz.export_html import html_page
from workbench.viz.layout.packet import decode_packet
from workbench.viz.pareto import pareto_svg


class Collector(HTMLParser):
    """Tags, attribute names and text of a piece of HTML."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data):
        self.text += data


def check_fragment(html):
    """Check that HTML has no script, handler, link or resource to fetch, and that every picture is well formed.

    Returns:
        The tags, attributes and text of the HTML, and the text of its pictures.
    """
    found = Collector(html)
    assert not {"script", "svg", "iframe", "link", "object", "embed", "textarea"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on") and name != "href" and (name != "src" or value.startswith(IMAGE))
        assert "url(" not in (value or "")
    assert all(alt for name, alt in found.attributes if name == "alt") and len(pictures(html)) == found.tags.count(
        "img"
    )
    for picture in pictures(html):
        inside = Collector(picture)
        assert not {"script", "image", "foreignobject", "use", "a"} & set(inside.tags)
        assert not any(name.startswith("on") or name.endswith("href") for name, _ in inside.attributes)
        ET.fromstring(picture)
        found.text += inside.text
    return found


def test_a_step_shows_the_block_tables_of_all_groups():
    groups = [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 6}, {"kind": "mamba"}]
    requests = [{"id": f"r{i}", "prompt": {"len": 20 + i}, "max_tokens": 9} for i in range(2)]
    config = {"block_size": 4, "num_blocks": 60, "kv_cache_groups": groups}
    holes = 0
    for record in simulate({"config": config, "requests": requests}):
        picture = svg.block_tables(record, {})
        ET.fromstring(picture)
        shown = [int(block) for block in re.findall(r"physical block (\d+)<", picture)]
        tables = [table for tables in record.block_tables_by_group.values() for table in tables]
        assert shown == [block for table in tables for block in table if block]
        labels = [part for part in ET.fromstring(picture).iter("text") if part.get("class").startswith("label")]
        assert [int(label.text) for label in labels] == shown
        assert picture.count("not held") == sum(table.count(0) for table in tables)
        assert picture.count(">group 1<") == picture.count(">group 2<") == len(record.chunks)
        holes += picture.count("not held")
    assert holes


def test_a_step_shows_its_batch_tables_events_and_reasons():
    trace = random_trace(1, num_blocks=60)
    for record in trace:
        found = check_fragment(record._repr_html_())
        for chunk in record.chunks:
            assert f"q[{record.cu_seqlens_q[record.chunks.index(chunk)]}, " in found.text
        for request_id, why in record.not_scheduled.items():
            assert request_id in found.text and str(why) in found.text
        for event in record.events:
            assert event.kind in found.text
        assert found.tags.count("img") == (3 if record.chunks else 0)


def rasterised(picture, num_rows, num_columns):
    """The cells whose middle lies in a polygon of a mask's picture, bool [rows, columns]."""
    drawing = ET.fromstring(picture)
    box = next(part for part in drawing.iter("rect") if part.get("class") == "slack")
    left, across, down = float(box.get("x")), float(box.get("width")) / num_columns, float(box.get("height")) / num_rows
    cells = np.zeros((num_rows, num_columns), bool)
    for polygon in drawing.iter("polygon"):
        corners = np.array([tuple(map(float, pair.split(","))) for pair in polygon.get("points").split()])
        xs, ys = (corners[:, 0] - left) / across, corners[:, 1] / down
        for row in range(num_rows):
            middle, crossings = row + 0.5, []
            for (x0, y0), (x1, y1) in zip(zip(xs, ys), zip(np.roll(xs, -1), np.roll(ys, -1))):
                if (y0 <= middle) != (y1 <= middle):
                    crossings.append(x0 + (middle - y0) / (y1 - y0) * (x1 - x0))
            for begin, end in zip(*[iter(sorted(crossings))] * 2):
                cells[row] |= (np.arange(num_columns) + 0.5 > begin) & (np.arange(num_columns) + 0.5 < end)
    return cells


@pytest.mark.parametrize("seed", range(6))
def test_the_picture_of_the_mask_is_the_mask(seed):
    """Cell by cell: chunks that begin anywhere, decodes, prefix hits, preemptions."""
    trace, kinds = random_trace(seed), set()
    for record in trace:
        if not record.chunks:
            continue
        expected = np.zeros((record.num_tokens, sum(record.seqused_k)), bool)
        row = column = 0
        for chunk in record.chunks:
            kinds.add(chunk.arm)
            for place in range(chunk.num_tokens):
                expected[row + place, column : column + chunk.start + place + 1] = True
            row, column = row + chunk.num_tokens, column + chunk.start + chunk.num_tokens
        source = svg.mask(record, {})
        right = max(
            float(pair.split(",")[0]) for points in re.findall(r'points="([^"]*)"', source) for pair in points.split()
        )
        assert right == pytest.approx(svg.LEFT + svg.SPACE, abs=0.1), "as wide as the other pictures of a slide"
        found = rasterised(source, record.num_tokens, column)
        if max(chunk.num_tokens for chunk in record.chunks) <= 64:
            assert (found == expected).all()
        else:  # long chunks have a straight edge
            assert (found != expected).sum() <= record.num_tokens
    assert {"decode", "intermediate", "new_final"} <= kinds


@pytest.mark.parametrize("length", [40, 300])
def test_the_picture_of_the_mask_has_the_window_of_its_group(length):
    requests = [{"id": "a", "prompt": {"len": length}}, {"id": "b", "prompt": {"len": 5}}]
    groups = [{"kind": "mamba"}, {"kind": "sliding_window", "sliding_window": 11}, {"kind": "full_attention"}]
    trace = simulate({"requests": requests}, config={"kv_cache_groups": groups, "max_num_batched_tokens": 210})
    for record in list(trace)[:4]:
        row = column = 0
        expected = np.zeros((record.num_tokens, sum(record.seqused_k)), bool)
        for chunk in record.chunks:
            for position in range(chunk.start, chunk.end):
                expected[row, column + max(0, position - 10) : column + position + 1] = True
                row += 1
            column += chunk.end
        found = rasterised(svg.mask(record, {}), *expected.shape)
        is_sloping = max(chunk.num_tokens for chunk in record.chunks) > 64
        assert (found != expected).sum() <= is_sloping * 2 * record.num_tokens


def test_a_long_chunk_has_a_straight_edge():
    record = next(
        iter(simulate({"requests": [{"id": "a", "prompt": {"len": 300}}, {"id": "b", "prompt": {"len": 5}}]}))
    )
    found = rasterised(svg.mask(record, {}), 305, 305)
    expected = np.tri(305, dtype=bool)
    expected[300:, :300] = False
    assert (found != expected).sum() <= 300 and svg.mask(record, {}).count(",") < 100


def test_a_part_of_a_run_lists_the_requests_of_its_steps():
    """An answer is drawn as the steps that computed it: earlier requests have no part in them."""
    requests = [{"id": name, "prompt": {"len": 9}, "max_tokens": 3, "arrival_step": at} for name, at in QUEUE.items()]
    trace = simulate({"requests": requests, "config": {"max_num_seqs": 1}})
    for first in range(len(trace)):
        part = trace[first:]
        shown = Collector(part._repr_html_()).text
        inside = {name for step in part for name in (*step.running, *step.waiting, *step.finished)}
        assert {name for name in QUEUE if name in shown} == (set(QUEUE) if not first else inside), first
    assert "alpha" not in Collector(trace[-3:]._repr_html_()).text
    waits = Collector(trace[:1]._repr_html_()).text
    assert "alpha" in waits and "beta" in waits and "gamma" not in waits


QUEUE = {"alpha": 0, "beta": 0, "gamma": 5}


def test_a_table_of_events_has_no_column_without_a_word():
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 3}]})
    said = [Collector(step._repr_html_()).text for step in trace]
    assert "why" not in said[0] and "why" in said[-1], "the end of a request has a reason"


def test_a_step_says_its_numbers_in_text():
    for record in random_trace(3, num_blocks=60):
        found = Collector(record._repr_html_())  # the text outside the pictures
        for chunk in record.chunks:
            assert f"{chunk.start} → {chunk.end}" in found.text
        assert ("num_kv_computed" in found.text and "mask" in found.text) == bool(record.chunks)
        labels = [value for name, value in found.attributes if name == "alt"]
        assert not record.chunks or f"Attention mask of step {record.step}" in labels[1]


def test_traces_and_pools_are_drawn():
    trace = random_trace(1)
    found = check_fragment(trace._repr_html_())
    assert all(request_id in found.text for request_id in trace.requests) and "img" in found.tags
    pool = trace.pool_state(len(trace) // 2)
    check_fragment(pool._repr_html_())
    check_fragment(Trace(TraceMeta())._repr_html_())
    check_fragment(reprs.engine_html(SimpleNamespace(facts=lambda: {"model": "tiny", "state": "idle"}, trace=trace)))


def test_small_steps_below_a_large_budget_are_visible():
    requests = [{"id": f"r{i}", "prompt": {"len": 3}, "max_tokens": 4} for i in range(4)]
    heights = {}
    for budget in (16, 512):
        found = svg.timeline(list(simulate({"requests": requests}, config={"max_num_batched_tokens": budget})))
        heights[budget] = [
            float(bar.get("height")) for bar in ET.fromstring(found).iter("rect") if bar.get("class") == "decode"
        ]
        assert ("the budget of 512 is higher" in found) == (budget == 512)
    assert min(heights[512]) >= min(heights[16]) > 10


def test_columns_without_a_text_are_left_out():
    assert "<th>text</th>" not in simulate({"requests": [{"id": "a", "prompt": {"len": 3}}]})._repr_html_()
    assert "<th>text</th>" in hostile_trace("a reply")._repr_html_()


def test_a_view_has_a_still_picture_for_pages_without_a_kernel(monkeypatch):
    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")
    data, _ = watch(random_trace(1))._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data and "img" in check_fragment(data["text/html"]).tags


def test_points_of_a_wide_range_stay_apart_and_their_labels_too():
    values = [(0.8, 0.305), (0.81, 0.306), (0.82, 0.3065), (40.0, 0.27)]
    rows = [
        {"ttft_mean": first, "itl_mean": gap, "output_throughput": 10.0 + i, "pareto": True, "seats": i}
        for i, (first, gap) in enumerate(values)
    ]
    found = ET.fromstring(pareto_svg(rows, ["seats"], [("now", rows[0]), ("take", rows[1])]))
    labels = [(float(t.get("x")), float(t.get("y"))) for t in found.iter() if t.text in ("1", "2", "3", "now", "take")]
    left = [place for place in labels if place[0] < 440 and place[1] < 290]
    assert len(left) == 5
    assert all(abs(a[0] - b[0]) > 6 or abs(a[1] - b[1]) >= 12 for a, b in itertools.combinations(left, 2))
    middle = [float(mark.get("cy")) for mark in found.iter() if mark.tag.endswith("circle")]
    assert max(middle) - min(middle) > 100, "on a linear scale three of the points would be one"


def test_a_long_block_table_keeps_its_end():
    trace = simulate(
        {
            "config": {"block_size": 4, "num_blocks": 400},
            "requests": [{"id": "a", "prompt": {"len": 700}, "max_tokens": 2}],
        }
    )
    record = trace[-1]
    text = check_fragment(record._repr_html_()).text
    assert str(record.block_table(0)[-1]) in text and "…" in text


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=["script", "end-tags", "bidi", "long-word", "entities"])
def test_untrusted_text_stays_text(text):
    trace = hostile_trace([text] * 5)
    for html in (
        trace._repr_html_(),
        trace[0]._repr_html_(),
        trace.pool_state(0)._repr_html_(),
        reprs.engine_html(SimpleNamespace(facts=lambda: {"model": text}, trace=trace)),
    ):
        check_fragment(html)
    shown = Collector(trace._repr_html_()).text
    assert text[:40].replace("\x00", "\ufffd") in shown or text[:40] in shown


def test_many_sequences_are_counted_not_drawn():
    requests = [{"id": f"request-with-a-long-name-{i}", "prompt": {"len": 2}, "max_tokens": 3} for i in range(50)]
    trace = simulate(
        {"config": {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_blocks": 200}, "requests": requests}
    )
    assert "and 18 more sequences" in check_fragment(trace[1]._repr_html_()).text


# -- the ES module ----------------------------------------------------------------------------------------------


def test_the_module_uses_nothing_of_its_host_beyond_anywidget():
    """So it runs wherever anywidget does, including VS Code's notebooks, which no test here can run."""
    source = bundling.bundle()
    asked = set(re.findall(r"(?<![.\w])(?:this\.)?model\.(\w+)", source))
    assert asked == {"get", "set", "save_changes", "on", "off"}
    assert not re.search(
        r"\b(?:import\s*\(|require\s*\(|acquireVsCodeApi|Jupyter\b|window\.parent|postMessage)", source
    )
    assert re.findall(r"^import .*$", source, re.MULTILINE) == []


def test_the_modules_are_whole():
    sources = [bundling.bundle(entry) for entry in bundling.STYLE_SHEETS]
    for source in sources:
        check_module(source)
    for name in bundling.JS_DIRECTORY.glob("*.js"):
        assert any(f"const ${name.stem} =" in source for source in sources), f"{name.name} is not part of a view"


def check_module(source):
    assert "import " not in re.sub(r"^\s*(//|\*|/\*).*$", "", source, flags=re.MULTILINE).split("const $")[0]
    assert not re.search(r"^import\b", source, re.MULTILINE)
    assert source.count("export default { render };") == 1
    assert "__PALETTE__" not in source and "__STYLE__" not in source


def test_lines_of_the_modules_fit_a_screen():
    """Deno's formatter breaks code, and neither strings nor comments."""
    for path in bundling.JS_DIRECTORY.iterdir():
        too_long = [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > 120]
        assert not too_long, f"{path.name} has lines of more than 120 characters: {too_long}"


def test_nothing_in_the_module_can_reach_the_network_or_parse_html():
    for path in bundling.JS_DIRECTORY.iterdir():
        source = path.read_text(encoding="utf-8")
        if path.name == "connection.js":  # a served page asks the server that it comes from whether it is still there
            asked = "(script) => script.src.startsWith(location.origin)"
            assert source.count("fetch(") == source.count("fetch(src ?? location.href, ") == source.count(asked) == 1
            source = source.replace("fetch(", "")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "fetch(",
            "XMLHttpRequest",
            "http:",
            "https:",
            "url(",
            "@import",
            "@font-face",
        ):
            assert word not in source, f"{path.name} contains {word}"


def test_a_module_that_imports_what_is_not_exported_is_refused(tmp_path, monkeypatch):
    (tmp_path / "dashboard.js").write_text('import { missing } from "./other.js";\nexport function render() {}\n')
    (tmp_path / "other.js").write_text("export const present = 1;\n")
    monkeypatch.setattr(bundling, "JS_DIRECTORY", tmp_path)
    with pytest.raises(ValueError, match="missing"):
        bundling.bundle.__wrapped__()
    (tmp_path / "other.js").write_text('import { render } from "./dashboard.js";\nexport const missing = 1;\n')
    with pytest.raises(ValueError, match="circle"):
        bundling.bundle.__wrapped__()


# -- the notebook view -------------------------------------------------------------------------------------------


def test_every_watch_is_a_new_view(monkeypatch):
    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")
    trace = random_trace(1)
    first, second = watch(trace), watch(trace)
    assert first is not second and first.model_id != second.model_id
    assert decode_packet(first.packet)[0]["num_steps"] == len(trace)
    assert first.packet == second.packet


def test_a_view_follows_a_controller(monkeypatch):
    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")
    controller = ReplayingController(random_trace(1))
    view = watch(controller, panels=("packed",), theme="dark")
    assert view.options == {"panels": ["packed"], "theme": "dark"}
    controller.step()
    view.refresh()
    assert decode_packet(view.packet)[0]["num_steps"] == 1
    view.command = {"id": 1, "name": "add_request", "args": {"prompt": "hi"}}
    assert controller.added == [("hi", {})]
    view.command = {"id": 2, "name": "add_request", "args": {"prompt": ""}}
    view.refresh()
    assert view.status["message"] == "prompt must not be empty"


def test_without_threads_a_command_is_answered_at_once(monkeypatch):
    monkeypatch.setattr(background, "HAS_THREADS", False)
    monkeypatch.setattr(widget, "HAS_THREADS", False)
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]})
    view = watch(trace)
    view.command = {"id": 1, "name": "explain", "args": {"request_id": "a"}}
    assert view.status["handled"] == 1 and view.status["explained"]["request"] == "a"


def test_unknown_panels_and_themes_are_refused():
    with pytest.raises(ValueError, match="panels"):
        watch(random_trace(1), panels=("pakced",))
    with pytest.raises(ValueError, match="theme"):
        watch(random_trace(1), theme="blue")


# -- the page ------------------------------------------------------------------------------------------------------


def packet_of(page, name="packet"):
    data = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)[1]
    return decode_packet(gzip.decompress(base64.b64decode(data)))


def test_the_page_holds_the_whole_trace():
    trace = random_trace(1)
    header, arrays = packet_of(html_page(trace))
    assert header["num_steps"] == len(trace) and header["facts"]["source"] == "simulation"
    assert arrays["chunk.num_tokens"].sum() == sum(record.num_tokens for record in trace)


def test_the_page_is_one_file_that_connects_to_nothing():
    page = html_page(hostile_trace())
    assert "default-src 'none'" in page
    found = Collector(page)
    assert not {name for name, _ in found.attributes} & {"src", "href"}
    ends = page.count("</script>")
    assert ends == page.count("<script") == 3, "a string of the module or the trace ends the script element"
    assert HOSTILE_TEXTS[0] not in page


def test_a_page_of_500_steps_is_small(tmp_path):
    import random

    rng = random.Random(0)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(50, 1500)}, "max_tokens": 470, "arrival_step": i}
        for i in range(24)
    ]
    trace = simulate(
        {
            "config": {"max_num_batched_tokens": 512, "max_num_seqs": 24, "num_blocks": 4000, "max_model_len": 8192},
            "requests": requests,
        }
    )
    assert len(trace) >= 490
    trace.to_html(tmp_path / "trace.html")
    assert (tmp_path / "trace.html").stat().st_size < 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 1, [0]),
        (0, 8, list(range(8))),
        (0, 12, [0, 2, 4, 6, 8, 10]),
        (3, 44, [10, 20, 30, 40]),
        (95, 130, [95, 100, 105, 110, 115, 120, 125]),
        (0, 20_000, [0, 5_000, 10_000, 15_000]),
    ],
)
def test_ticks_are_round_steps_equally_far_apart(first, last, expected):
    assert list(svg.step_ticks(first, last)) == expected


def test_tooltips_name_the_role_of_a_chunk_and_the_reason_for_its_length():
    trace = simulate({"config": {"max_num_batched_tokens": 16}, "requests": [{"id": "r", "prompt": {"len": 40}}]})
    first, last = (svg.packed_batch(trace[step], {}) for step in (0, 2))
    assert "r: part of a prompt, q[0, 16)  16 rows  kv 0 → 16, limited by token budget" in first
    assert "r: last chunk, q[0, 8)  8 rows  kv 32 → 40, not limited" in last


def test_live_views_and_static_pictures_use_the_same_words():
    source = (bundling.JS_DIRECTORY / "words.js").read_text(encoding="utf-8")
    assert dict(re.findall(r'^  (\w+): "(.*)",$', source, re.MULTILINE)) == words.ROLES
    assert f'"{words.limit_of("complete")}"' in source


def test_ids_beside_the_pictures_of_a_step_are_told_apart():
    trace = Trace.load(Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz")
    record = trace[100]
    ids = [chunk.request_id for chunk in record.chunks]
    names = svg.names_in_pictures(ids)
    assert len(ids) > 5 and len({*names.values()}) == len(ids) and max(map(len, names.values())) <= 12
    packed = svg.packed_batch(record, {})
    assert all(packed.count(f">{name}</text>") == 1 for name in names.values())
    assert svg.names_in_pictures(["a-request-of-one", "b"]) == {"a-request-of-one": "a-reque…-one", "b": "b"}
    assert svg.names_in_pictures(["alone-in-this-step"])["alone-in-this-step"] == "alone-i…step"
    assert svg.names_in_pictures([]) == {}
