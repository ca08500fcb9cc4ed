"""A recorded kernel in a notebook: its numbers, and the widget."""

import mlx.core as mx
import pytest
from msl_runs import skip_without_compiler

from workbench import msl

skip_without_compiler()


@pytest.fixture
def run():
    kernel = msl.metal_kernel("bold", ["x"], ["y"], "uint i = thread_position_in_grid.x;\ny[i] = x[i + 1];")
    x = mx.arange(64).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(64,)], "output_dtypes": [x.dtype]}
    return kernel.record(**launch, grid=(64, 1, 1), threadgroup=(32, 1, 1), threadgroups=2)


def test_a_run_draws_its_numbers_and_its_fault(run):
    html = run._repr_html_()
    assert "out-of-bounds read of 4 bytes at x[64]" in html and "bytes that all threads have loaded" in html
    for number in run.numbers:
        assert f"<td>{number.name}</td>" in html


def test_the_widget_has_the_packet_of_the_page(run):
    pytest.importorskip("anywidget")
    view = run.watch()
    assert view.packet == run.packet() and "KernelRunView(kernel bold" in repr(view)
    assert "export default { render };" in view._esm
    bundle = view._repr_mimebundle_()
    assert "out-of-bounds" in bundle[0]["text/html"]
    view.close()


def test_a_saved_notebook_keeps_the_numbers_which_the_widget_hides(run, monkeypatch):
    pytest.importorskip("anywidget")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    view = run.watch()
    view._ipython_display_()
    widget, picture = shown
    assert "application/vnd.jupyter.widget-view+json" in widget and "text/html" not in widget
    assert f'class="{view.still}"' in picture["text/html"] and "out-of-bounds" in picture["text/html"]
    assert 'hideStill(model.get("still"))' in view._esm
    view.close()


def test_a_page_is_written_whole_or_not_at_all(run, tmp_path):
    with pytest.raises(OSError):
        run.save_html(tmp_path / "nothere" / "run.html")
    run.save_html(tmp_path / "run.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    page = (tmp_path / "run.html").read_text()
    assert "http" not in page.split('<script type="module">')[0].replace("http-equiv", "")


def test_a_recording_too_large_for_a_page_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.viz.kernel_run.MAX_EVENTS", len(run.events) - 1)
    for show in (run.watch, lambda: run.save_html(tmp_path / "run.html")):
        with pytest.raises(ValueError, match="and the maximum of a page is"):
            show()
    assert not list(tmp_path.iterdir())
