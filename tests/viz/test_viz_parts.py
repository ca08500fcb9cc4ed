"""Parts of the dashboard by themselves: widgets, Panel components and figures, under one cursor."""

import gc
import re
import weakref
from pathlib import Path
from xml.etree import ElementTree

import panel
import pytest
from bokeh.document import Document
from bokeh.models import Column
from viz_traces import pictures, random_trace

import workbench
from workbench.viz.app import TracePage
from workbench.viz.cursor import Cursor, cursor_of
from workbench.viz.feed import Feed
from workbench.viz.image import standalone
from workbench.viz.panel_names import PANELS
from workbench.viz.panes import AttentionMask, Pane, Pool, Timeline
from workbench.viz.widget import view, watch


@pytest.fixture(autouse=True)
def headless(monkeypatch):
    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")


@pytest.fixture
def trace():
    return random_trace(3)


def test_one_cursor_moves_every_view_of_a_trace(trace):
    pool, timeline, other = trace.view("pool"), watch(trace), watch(random_trace(4))
    assert pool.shared_cursor is timeline.shared_cursor is cursor_of(trace) is not other.shared_cursor
    assert pool.options == {"panels": ["pool"], "theme": "auto", "bare": True}
    cursor_of(trace).step = 3
    assert pool.cursor == timeline.cursor == {"step": 3, "follow": True, "request": None} and other.cursor == {}
    # As the browser sends it.
    timeline.cursor = {"step": 7, "follow": False, "request": "r1"}
    assert (pool.shared_cursor.step, pool.shared_cursor.request) == (7, "r1") and pool.cursor == timeline.cursor
    assert view(trace, "events").cursor["step"] == 7, "a new view begins where the others are"
    seen = []
    cursor_of(trace).param.watch(lambda event: seen.append(event.new), "step")
    pool.cursor = {"step": 2, "follow": False, "request": None}
    # The browser sends its step itself, a moment later, and may have moved on: an echo would take it back.
    assert seen == [2] and timeline.step == 2 != pool.step
    pool.step = 2
    assert seen == [2]
    timeline.step = 4  # as a linked slider sends it
    assert (cursor_of(trace).step, cursor_of(trace).follow, pool.cursor["step"], pool.step) == (4, False, 4, 4)


def test_places_that_arrive_together_leave_a_page_where_it_is(trace):
    """A page sends a cursor, then its step. A slow server may take two cursors with the first one's step."""
    page = TracePage(Feed(trace), cursor=(cursor := Cursor()))
    places = [{"step": step, "follow": False, "request": None} for step in (5, 7)]
    page.param.update(cursor=places[1], step=5)
    assert page.cursor == places[1] and cursor.step == 7
    page.param.update(step=7)
    assert page.cursor == places[1] and cursor.step == page.step == 7
    page.step = 3
    assert cursor.step == page.cursor["step"] == 3, "a control linked to the step moves the cursor"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("before", [None, 1, 3])
def test_a_view_that_loads_late_keeps_the_step_that_python_chose(deno_page, trace, before, live):
    """A page tells its place when it first draws, and Python has chosen the next step before that arrives."""
    shown, cursor = watch(trace), cursor_of(trace)
    cursor.step = before
    cursor.request = "r1" if before == 3 else None
    deno_page.open(trace, cursor=shown.cursor, status={"live": live})
    cursor.step = 2
    for name, value in deno_page("page.told"):
        setattr(shown, name, value)
    assert cursor.step == shown.step == shown.cursor["step"] == 2

    deno_page("page.listeners['change:cursor']((page.values.cursor = argument))", shown.cursor)
    deno_page("page.listeners['change:step']((page.values.step = argument))", shown.step)
    assert deno_page("(page.frame(), view.store.label(view.cursor.step))") == 2 and deno_page("page.told") == []
    deno_page.seek(5)  # a person moves the page
    deno_page("page.frame()")
    for name, value in deno_page("page.told"):
        setattr(shown, name, value)
    assert (cursor.step, cursor.follow) == (5, False)


def test_a_page_waits_for_a_step_that_it_does_not_have_yet(deno_page, trace):
    deno_page.open(trace, status={"live": True})
    last = deno_page("view.store.label(view.cursor.last)")
    deno_page("page.listeners['change:step']((page.values.step = argument))", last + 5)
    deno_page("page.frame()")
    assert deno_page("page.told") == [] and deno_page("view.place.later.step") == last + 5


@pytest.mark.parametrize("sent", [{"step": -1}, {"step": True}, {"step": "3"}, {"step": 1, "request": 5}])
def test_nonsense_from_a_browser_does_not_move_the_cursor(trace, sent):
    shown = watch(trace)
    shown.cursor = {"step": 4, "follow": False, "request": None}
    shown.cursor = sent
    assert shown.shared_cursor.step == 4
    with pytest.raises(ValueError, match="step"):
        Cursor().step = -1


def test_a_text_names_one_panel_or_several_with_commas(trace):
    for panels in ("chunks", ["chunks"], ("Chunks",)):
        assert watch(trace, panels=panels).options["panels"] == ["gantt"]
    assert watch(trace, panels="chunks, KV pool").options["panels"] == ["gantt", "pool"]
    with pytest.raises(ValueError, match=r"panels: unknown 'chunkz'; known are .* \(did you mean chunks\?\)"):
        watch(trace, panels="chunkz")
    with pytest.raises(ValueError, match="panels: unknown ''"):
        watch(trace, panels="")


def test_unknown_names_are_refused(trace):
    with pytest.raises(ValueError, match="panels: unknown"):
        trace.view("pols")
    with pytest.raises(ValueError, match="view must be one of story, scheduler"):
        watch(trace, view="storry")


def test_panes_are_panel_components_under_the_same_cursor(trace):
    pool, timeline = Pool(trace), Timeline(trace, theme="dark")
    assert pool.cursor is timeline.cursor is cursor_of(trace)
    page = timeline.__panel__()
    assert page.options == {"panels": ["timeline"], "theme": "dark", "bare": True} and len(page.packet) > 1000
    pool.cursor.step = 5
    assert page.cursor["step"] == 5
    assert AttentionMask(trace, cursor=(own := Cursor())).cursor is own
    with pytest.raises(ValueError, match="theme"):
        Pool(trace, theme="pink")
    assert {kind.panel_name for kind in Pane.__subclasses__()} <= set(PANELS.values())


def test_figures_hold_the_numbers_of_the_metrics(trace):
    metrics = trace.metrics()
    figure = trace.figure()
    assert isinstance(figure, Column) and isinstance(metrics.figure(), Column)
    tokens = figure.children[0].renderers[0].data_source
    assert tokens.data["top"].tolist() == [record.num_tokens for record in trace]
    assert tokens.data["prefill"].tolist() == [record.num_prefill_tokens for record in trace]
    latencies = figure.children[1].renderers[0].data_source.data
    assert dict(zip(latencies["request"], latencies["first"])) == {
        request_id: request.ttft.steps for request_id, request in metrics.requests.items() if request.ttft
    }
    tokens.selected.indices = [6, 5, 9]
    assert (cursor_of(trace).step, cursor_of(trace).follow) == (5, False)
    metrics.figure().children[0].renderers[0].data_source.selected.indices = [7]
    assert cursor_of(trace).step == 7
    for plot in figure.children:
        axis = plot.xaxis[0].ticker
        assert (axis.min_interval, axis.num_minor_ticks) == (1, 0), "steps and requests are whole"
        assert plot.y_range.start == 0


def marked(figure):
    """The step that the mark of a figure stands at; None without one."""
    mark = next(item for item in figure.children[0].center if type(item).__name__ == "Span")
    return mark.location if mark.visible else None


def test_a_figure_follows_the_cursor(trace):
    figure, cursor = trace.figure(), cursor_of(trace)
    assert marked(figure) is None
    axis, told = figure.children[0].x_range, []
    axis.on_change("start", lambda _attr, _old, new: told.append(new))
    cursor.step = 2
    assert marked(figure) == 2 and marked(trace.figure()) == 2
    cursor.range = None
    assert not told, "a browser that has not told its range gets none"
    axis.update(start=4.0, end=8.0)  # as the browser tells it after a zoom
    cursor.step = 5
    assert (axis.start, axis.end) == (4, 8), "in sight"
    cursor.step = 11
    assert (axis.start, axis.end) == (9, 13) and marked(figure) == 11
    cursor.step = None
    assert marked(figure) is None


def test_a_figure_and_a_view_show_the_same_steps(trace):
    """A zoom of either is told as the browser tells it."""
    figure, shown, cursor = trace.figure(), trace.view("step_timeline"), cursor_of(trace)
    axis, last = figure.children[0].x_range, trace[-1].step
    axis.update(start=-0.9, end=last + 0.9)  # what a browser tells first: everything is in sight
    assert cursor.range is None and "range" not in cursor.to_view()
    axis.update(start=3.5, end=8.5)
    assert cursor.range == (4, 9) and shown.cursor["range"] == [4, 9]
    shown.cursor = {"step": 5, "follow": False, "request": None, "range": [2, 10.5]}
    assert cursor.range == (2, 10.5) and (axis.start, axis.end) == (1.5, 10)
    later = trace.figure().children[0].x_range
    assert (later.start, later.end) == (1.5, 10)
    axis.update(start=7.0)
    axis.update(start=20.0)  # a message with one edge: the range is empty until the other comes
    assert cursor.range == (7.5, 10.5)
    shown.cursor = {"step": 5, "follow": False, "request": None, "range": None}
    assert cursor.range is None and (axis.start, axis.end) == (-0.5, last + 0.5)
    for nonsense in ([4], [9, 4], ["a", "b"], [1, float("nan")], [True, 5], 7):
        cursor.range = (2, 6)
        shown.cursor = {"step": 5, "follow": False, "request": None, "range": nonsense}
        assert cursor.range is None
    before = cursor.range = (3, 7)
    shown.cursor = {"step": 6, "follow": False, "request": None}  # of a host that knows no ranges
    assert cursor.range == before and cursor.step == 6


def test_a_served_figure_is_changed_in_its_documents_turn(trace, monkeypatch):
    figure, turns = trace.figure(), []
    document = Document()
    document.add_root(figure)
    monkeypatch.setattr(Document, "session_context", object())
    monkeypatch.setattr(Document, "add_next_tick_callback", lambda self, change: turns.append(change))
    cursor_of(trace).step = 3
    assert marked(figure) is None and len(turns) == 1, "a thread may have moved the cursor"
    turns[0]()
    assert marked(figure) == 3


def test_a_figure_that_is_gone_is_not_kept_by_its_cursor(trace):
    gone = weakref.ref(trace.figure())
    gc.collect()
    assert gone() is None
    cursor_of(trace).step = 3


def test_a_notebook_shows_a_figure_without_set_up(trace, monkeypatch):
    display = pytest.importorskip("IPython.core.formatters").IPythonDisplayFormatter()
    shown, loads = [], []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr(
        panel,
        "extension",
        type("Extension", (), {"_loaded": False, "__init__": lambda _, inline: loads.append(inline)}),
    )
    figure = trace.figure()
    assert display(figure) is True, "the figure shows itself"
    assert loads == [True] and shown[0].object is figure
    panel.extension._loaded = True
    assert display(trace.metrics().figure()) is True and loads == [True] and len(shown) == 3
    assert " hidden>" in shown[1].data, "a note for a page that was loaded again"
    assert display(Column()) is None, "any other layout leaves it to Bokeh"


def test_a_panel_has_one_name_everywhere(trace):
    """That of its title; the browser's words are accepted too."""
    folder = Path(workbench.__file__).parent / "viz" / "js"
    titles = {}
    for file in folder.glob("*.js"):
        for found in re.finditer(r'super\(view, \{\s*id: "(\w+)",\s*title: "([^"]+)"', file.read_text()):
            titles[found[1]] = found[2].lower().replace(" ", "_")
    assert titles == {shown: name for name, shown in PANELS.items()}
    for name, shown in PANELS.items():
        assert (
            watch(trace, panels=(name,)).options["panels"] == watch(trace, panels=(shown,)).options["panels"] == [shown]
        )
    with pytest.raises(ValueError, match="unknown 'pole'; known are step_timeline, chunks"):
        view(trace, "pole")


def test_a_step_draws_one_panel(trace):
    step = next(record for record in trace if len(record.chunks) > 1)
    for name, title in (
        ("attention_mask", "Attention mask"),
        ("packed", "Packed batch"),
        ("block_tables", "Block tables"),
    ):
        picture = step.view(name)
        assert (
            repr(picture) == f"StepPicture('{title} of step {step.step}')" and len(pictures(picture._repr_html_())) == 1
        )
    assert "arrive" in trace[0].view("events")._repr_html_()
    with pytest.raises(ValueError, match="a step draws packed_batch, attention_mask, block_tables, events"):
        step.view("kv_pool")


def test_a_picture_of_a_step_is_an_svg_file(tmp_path, trace):
    step = next(record for record in trace if len(record.chunks) > 1)
    for name in ("packed_batch", "attention_mask", "block_tables"):
        path = tmp_path / f"{name}.svg"
        step.view(name).save(path)
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and len(list(root.iter())) > 6
        assert standalone(path.read_text()) == path.read_text(), "it stands by itself"
    with pytest.raises(ValueError, match=f"Events of step {step.step} is a table: the pictures are packed_batch"):
        step.view("events").save(tmp_path / "events.svg")
    assert not (tmp_path / "events.svg").exists()
