"""A notebook shows our errors in three lines, the caller's among them, and the whole traceback when asked again."""

import pickle

import pytest

from workbench import EngineConfig, SamplingParams
from workbench.base.field_checks import FieldError
from workbench.base.short_traceback import ShortTraceback, is_on_purpose, shorten_in
from workbench.models.bundled import BundledModelError, UnknownModelError, is_bundled
from workbench.trace import TraceError

CELL = "seats = 3\nEngineConfig(max_num_seq=seats)\n"


def run_cell(code, capsys, *, imported=False, **names):
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell(colors="nocolor")
    shell.user_ns.update(names)
    if imported:  # the package was imported in this shell
        shorten_in(shell)
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


def test_a_long_message_is_cut_and_whole_when_asked_again(capsys):
    def refuse():
        raise FieldError(f"unknown field 'seats'; the fields are {', '.join(f'field {i}' for i in range(60))}")

    short, whole = run_cell("refuse()", capsys, refuse=refuse)
    message, _, _ = short.strip().splitlines()
    assert len(message) < 310 and message.endswith(", …") and "unknown field 'seats'" in message
    assert "field 59" in whole and "field 59" not in short


PLAIN = "from workbench import Trace, compare, simulate\n"
PLAIN += "trace = simulate({'requests': [{'id': 'a', 'prompt': {'len': 3}}]})\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("Trace.load('nope.jsonl')", "No such file or directory: 'nope.jsonl'"),
        ("trace.view('chonks')", "unknown 'chonks'"),
        ("simulate({'requests': [{'prompt': {'len': 3}}]})", "requests[0].id must be"),
        ("trace.explain('b')", "'b'"),
        ("simulate(7)", "workload"),
        ("compare(trace, 3)", "b must be a Trace, such as engine.trace, got 3"),
        ("compare('run.jsonl', trace)", "a must be a Trace, such as engine.trace, got 'run.jsonl'"),
        ("trace.pool_state(88)", "step 88 of a trace of "),
        ("trace.save(pth='x')", "got an unexpected keyword argument 'pth'"),
        ("Trace.load()", "missing 1 required positional argument: 'path'"),
    ],
)
def test_every_error_raised_on_purpose_is_three_lines_where_the_package_was_imported(code, message, capsys):
    short, whole = run_cell(PLAIN + code, capsys, imported=True)
    assert len(short.strip().splitlines()) == 3 and message in short and code in short and "%tb" in short
    assert "Traceback (most recent call last)" in whole and "workbench" in whole and message in whole


OTHERS = (
    "def f():\n    raise ValueError('theirs')\nf()",
    "import json\njson.loads('{')",
    "open('nope')",
    "class Other:\n    def act(self): pass\nOther().act(3)",
    # Their own code that ours calls, and a mistake of ours.
    "from workbench import EngineConfig\nclass Odd:\n    def __index__(self): raise ValueError('theirs')\n"
    "EngineConfig(num_blocks=Odd())",
    "from workbench.base.text import counted\ncounted(None, None)",
)


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("code", OTHERS)
def test_other_errors_keep_their_traceback(code, imported, capsys):
    first, again = run_cell(code, capsys, imported=imported)
    assert "Traceback" in first and "%tb" not in first and "Traceback" in again


def test_a_shell_with_a_handler_of_its_own_keeps_it():
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell()
    shell.set_custom_exc((OSError,), lambda *args, **kwargs: None)
    shorten_in(shell)
    assert shell.custom_exceptions == (OSError,)


def test_a_bare_raise_passes_on_what_others_raised():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert not is_on_purpose(caught.value)


@pytest.mark.parametrize("kind", [TraceError, BundledModelError, UnknownModelError])
def test_the_errors_are_what_they_were(kind):
    problem = kind("why")
    assert isinstance(problem, ShortTraceback) and str(problem) == "why"
    assert isinstance(problem, (ValueError, OSError)) and isinstance(problem, Exception)
    again = pickle.loads(pickle.dumps(problem))
    assert type(again) is kind and str(again) == "why"
    assert problem._render_traceback_()[-1].endswith("why"), "never raised: Python's own words"
