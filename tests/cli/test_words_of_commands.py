"""The words of the command line: one for the file that a command writes, suggestions, and help that can be read."""

import argparse
import re
from pathlib import Path

import pytest

from workbench import simulate
from workbench.apps.cli import build_parser, main

RECORDING = str(Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz")

OTHER_FILES = {"--plot", "--rows", "--build"}
"""Options for a second file beside the one that ``--out`` names, or for one that the command reads again."""


def parsers(parser):
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


ALL = {parser.prog: parser for parser in parsers(build_parser())}


@pytest.mark.parametrize("prog", ALL)
def test_what_a_command_writes_is_named_out(prog):
    for action in ALL[prog]._actions:
        shown = action.option_strings and action.help is not argparse.SUPPRESS
        if shown and action.type is Path and re.search(r"\b(save|write|folder for|table of|keep each)\b", action.help):
            assert set(action.option_strings) <= {"--out", "-o", *OTHER_FILES}


def test_the_file_is_the_last_word_or_out(tmp_path, capsys):
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 5}}], "cost_model": {"fixed": 1.0}})
    trace.save(tmp_path / "run.jsonl")
    for command in ("html", "perfetto", "otlp"):
        for words in (["--out", str(tmp_path / "1")], [str(tmp_path / "2")]):
            assert main(["trace", command, str(tmp_path / "run.jsonl"), *words]) == 0
            assert words[-1] in capsys.readouterr().out
        assert (tmp_path / "1").stat().st_size == (tmp_path / "2").stat().st_size


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["simulte"], "did you mean simulate?"),
        (["Serve"], "did you mean serve?"),
        (["trace", "exlain"], "did you mean explain?"),
        (["trace", "perfeto"], "did you mean perfetto?"),
        (["fleet", "compar"], "did you mean compare?"),
        (["kernel", "chek"], "did you mean check?"),
        (["course", "grades"], "did you mean grade?"),
        (["bench", "--dataset-name", "rendom"], "did you mean random?"),
        (["serve", "--hots", "x"], "did you mean --host?"),
        (["hunt", "replay", "x", "--aganst", "y"], "did you mean --against?"),
        (["trace", "html", "x", "--form", "1s"], "did you mean --from?"),
    ],
)
def test_a_wrong_word_gets_a_suggestion(words, meant, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and meant in said and "\n" not in said.partition("error: ")[2].strip()


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "tune", RECORDING, "--slo", "tft_p99=5s"],
        ["simulat", "x"],
        ["simulate", "x", "--" + "y" * 9 + " " + "z " * 60],
    ],
)
def test_errors_are_as_wide_as_the_terminal(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("{}")
    monkeypatch.setenv("COLUMNS", "80")
    try:
        status = main(words)
    except SystemExit as stop:  # of argparse
        status = stop.code
    said = capsys.readouterr().err.splitlines()
    assert status == 2 and len(said) > 1 and max(map(len, said)) <= 80, said


def test_a_word_like_no_command_gets_none(capsys):
    with pytest.raises(SystemExit):
        main(["xyzzy"])
    with pytest.raises(SystemExit):
        main(["simulate", "workload.json", "--bogus"])
    assert "did you mean" not in capsys.readouterr().err


def test_the_help_of_serve_has_groups_and_examples(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    groups = re.findall(r"^([a-z ]+):$", shown, re.M)
    assert groups[0] == "options" and groups[-1] == "examples" and len(groups) >= 7
    sizes = [len(re.findall(r"^  -", part, re.M)) for part in re.split(r"^[a-z ]+:$", shown, flags=re.M)]
    assert max(sizes) <= 8 and shown.partition("examples:")[2].count("workbench serve") == 2
