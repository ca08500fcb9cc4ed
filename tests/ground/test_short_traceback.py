"""A notebook shows our errors in three lines, the caller's among them, and the whole traceback when asked again."""

import pickle

import pytest

from workbench import EngineConfig, SamplingParams
from workbench.base.short_traceback import ShortTraceback
from workbench.models.bundled import BundledModelError, UnknownModelError, is_bundled
from workbench.trace import TraceError

CELL = "seats = 3\nEngineConfig(max_num_seq=seats)\n"


def run_cell(code, capsys, **names):
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell(colors="nocolor")
    shell.user_ns.update(names)
    capsys.readouterr()
    shell.run_cell(code)
    first = capsys.readouterr().out
    shell.run_line_magic("tb", "")
    return first, capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message", "line"),
    [
        (CELL, "did you mean max_num_seqs?", "EngineConfig(max_num_seq=seats)"),
        ("SamplingParams(\n  max_token=2)", "did you mean max_tokens?", "SamplingParams("),
        ("EngineConfig(num_blocks=1)", "num_blocks must be from 2", "EngineConfig(num_blocks=1)"),
        ("x = is_bundled('smolm2')", "did you mean 'smollm2'", "x = is_bundled('smolm2')"),
    ],
)
def test_ipython_shows_three_lines_then_everything(code, message, line, capsys):
    names = {"EngineConfig": EngineConfig, "SamplingParams": SamplingParams, "is_bundled": is_bundled}
    short, whole = run_cell(code, capsys, **names)
    assert len(short.strip().splitlines()) == 3 and message in short and line in short and "%tb" in short
    assert "Traceback (most recent call last)" in whole and "workbench/" in whole and message in whole


def test_other_errors_keep_their_traceback(capsys):
    first, again = run_cell("def f():\n    raise ValueError('theirs')\nf()", capsys)
    assert "Traceback" in first and "%tb" not in first and "Traceback" in again


@pytest.mark.parametrize("kind", [TraceError, BundledModelError, UnknownModelError])
def test_the_errors_are_what_they_were(kind):
    problem = kind("why")
    assert isinstance(problem, ShortTraceback) and str(problem) == "why"
    assert isinstance(problem, (ValueError, OSError)) and isinstance(problem, Exception)
    again = pickle.loads(pickle.dumps(problem))
    assert type(again) is kind and str(again) == "why"
    assert problem._render_traceback_()[-1].endswith("why"), "never raised: Python's own words"
