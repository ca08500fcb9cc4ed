"""Progress on standard error: bars and a line that changes where somebody watches, elsewhere only the last line."""

import contextlib
import io
import sys

import pytest
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig, SamplingParams
from workbench.apps.cli import main
from workbench.base.progress import StatusLine, progress_bar, with_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[io.StringIO, Terminal], ids=["a pipe", "a terminal"])
def errors(request, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    return request.param()


def use_bars():
    with progress_bar(2, "sweep", "run", shown=True) as bar:
        bar.update()
        bar.set_postfix_str("best so far")
        bar.update()
    assert list(with_progress("ab", "save", "line", shown=True)) == ["a", "b"]


def test_bars_are_for_a_terminal(errors):
    with contextlib.redirect_stderr(errors):
        use_bars()
    said = errors.getvalue()
    assert (said == "") is not errors.isatty()
    assert not errors.isatty() or ("sweep" in said and "save" in said)


def test_bars_are_for_a_notebook_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        use_bars()
    assert "sweep" in errors.getvalue()


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}])
def test_the_bar_of_a_run_ends_with_the_state_after_its_last_step(monkeypatch, options):
    """Its rate is that of the whole run: a bar in a notebook ends with the rate that it showed last."""
    tqdm = pytest.importorskip("tqdm").tqdm
    shown = []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(mininterval=0, miniters=1, file=io.StringIO(), **options)

        def refresh(self, *args, **kwargs):
            shown.append((self.n, self.total, self.format_dict["postfix"], self.format_dict["rate"]))
            return super().refresh(*args, **kwargs)

    monkeypatch.setattr("workbench.base.progress._tqdm", lambda: Bar)
    with Engine(make_tiny_llama(), EngineConfig(num_blocks=64, **options)) as engine:
        for max_tokens in (4, 9):
            engine.add_request("w5 w6 w7", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.run()
        num_tokens = sum(chunk.num_tokens for step in engine.trace for chunk in step.chunks)
    assert shown[-1] == (num_tokens, num_tokens, "0 running, 0 waiting", None), "tqdm divides by the time of the run"


def test_the_bar_of_a_run_in_a_notebook_is_full_when_a_request_ends_early(monkeypatch):
    """The width of a bar there is the widget's maximum, not the total in its words."""
    tqdm = pytest.importorskip("tqdm.notebook").tqdm
    pytest.importorskip("ipywidgets")
    bars = []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(display=False, **options)
            bars.append(self)

    monkeypatch.setattr("workbench.base.progress._tqdm", lambda: Bar)
    with Engine(make_tiny_llama(), EngineConfig(num_blocks=64)) as engine:
        name = engine.add_request("w5 w6 w7", SamplingParams(max_tokens=200, ignore_eos=True))
        engine.on_step(lambda record: record.step == 4 and engine.abort(name))
        engine.run()
        num_tokens = sum(chunk.num_tokens for step in engine.trace for chunk in step.chunks)
    (bar,) = bars
    _, widget, words = bar.container.children
    assert widget.value == widget.max == bar.total == num_tokens < 20
    assert "in+out tok/s" in words.value.replace("\u2007", " ")


def test_a_line_that_changes(errors):
    line = StatusLine()
    with contextlib.redirect_stderr(errors):
        line.show("1 workload")
        line.above("a finding")
        line.show("2 workloads")
        line.end()
    clear = "\r\x1b[K"
    shown = f"{clear}1 workload{clear}a finding\n{clear}2 workloads\n"
    assert errors.getvalue() == (shown if errors.isatty() else "a finding\n2 workloads\n")


def test_commands_write_whole_lines_into_a_pipe(tmp_path, capsys):
    assert main(["hunt", "--workloads", "2", "--out", str(tmp_path / "found")]) == 0
    said = capsys.readouterr().err
    assert not {"\r", "\x1b"} & set(said) and said.startswith("2 workloads, ") and said.count("workloads, ") == 1
