"""Every command with wrong words: exit status 2, and one line that names the command, the word and the reason."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from workbench.apps.cli import build_parser, main

EXAMPLE = Path("examples/vllm_preemption.jsonl.gz").resolve()


def commands(parser, names=()):
    """Every command that runs something, and every group of commands, by the words that call it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield (*names, name), below
                yield from commands(below, (*names, name))


COMMANDS = dict(commands(build_parser()))
WORDS = {"--slo": "ttft_p99=1s", "--out": "out.html"}
NO_FILE = {("completion",): "a shell", ("notebooks",): "a folder that is made", ("trace", "kv-events"): "an address"}
"""Commands whose words are not files that they read."""

MAY_BE_EMPTY = {("kernel", "check"), ("kernel", "record")}
"""An empty kernel is a kernel: what is missing is its outputs."""


def words_of(parser):
    """The words without a name that a command needs, and all that may be left out."""
    words = [action for action in parser._actions if not action.option_strings]
    words = [action for action in words if not isinstance(action, argparse._SubParsersAction)]
    needed = [action for action in words if action.nargs not in ("?", "*")]
    return words, needed


def options_of(parser):
    """The options that a command needs, with values."""
    needed = [action.option_strings[0] for action in parser._actions if action.option_strings and action.required]
    return [word for name in needed for word in (name, WORDS.get(name, "1"))]


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that has to fail, in an empty folder; its last line of errors without the name of the command."""
    monkeypatch.chdir(tmp_path)

    def run(command, *words):
        try:
            status = main([*command, *words])
        except SystemExit as stop:
            status = stop.code
        output = capsys.readouterr()
        lines = output.err.strip().splitlines()
        assert status == 2 and lines, (command, words, output)
        assert "Traceback" not in output.err and "Errno" not in lines[-1] and "None" not in lines[-1], lines[-1]
        name = re.match(rf"workbench {' '.join(command)}: (error: )?", lines[-1])
        assert name is not None, lines[-1]
        if not name[1]:  # without the usage
            assert len(lines) == 1, lines
        return lines[-1][name.end() :]

    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_option_that_a_command_does_not_have_is_named_first(command, refused):
    assert refused(command, "--bogus").startswith("unrecognized arguments: --bogus")
    similar = next(name for name in COMMANDS[command]._option_string_actions if name.startswith("--"))
    assert f"{similar}x (did you mean {similar}?)" in refused(command, f"{similar}x")


WITH_SETTINGS = [
    name
    for name, parser in COMMANDS.items()
    if "--set" in parser._option_string_actions and "--max-num-seqs" not in parser._option_string_actions
]


@pytest.mark.parametrize("command", WITH_SETTINGS, ids=" ".join)
def test_an_option_of_vllm_leads_to_the_setting(command, refused):
    for words, setting in [
        (["--max-num-seqs", "2"], "max_num_seqs=2"),
        (["--max-num-seq=3"], "max_num_seqs=3"),
        (["--enable-prefix-caching"], "enable_prefix_caching=true"),
        (["--num-blocks", "--bogus"], "num_blocks=true"),
    ]:
        assert f"(did you mean --set {setting}?)" in refused(command, "x", *words), words


@pytest.mark.parametrize("command", [name for name, parser in COMMANDS.items() if words_of(parser)[1]], ids=" ".join)
def test_the_words_that_are_missing_are_named(command, refused):
    needed = words_of(COMMANDS[command])[1]
    names = ", ".join(action.metavar or action.dest for action in needed)
    said = refused(command)
    assert said.startswith("the following arguments are required: ")
    assert set(names.split(", ")) <= set(said.partition(": ")[2].split(", "))
    assert "request_id" not in said, "it may be left out"


NUMBERS = [
    (name, action)
    for name, parser in COMMANDS.items()
    for action in parser._actions
    if action.option_strings and action.type in (int, float)
]


@pytest.mark.parametrize(("command", "action"), NUMBERS, ids=[f"{' '.join(c)} {a.dest}" for c, a in NUMBERS])
def test_a_number_that_is_none_is_named_with_its_option(command, action, refused):
    words = ["x"] * len(words_of(COMMANDS[command])[1])
    said = refused(command, *words, f"{action.option_strings[-1]}=none")
    assert re.fullmatch(rf"argument (-\w/)?{action.option_strings[-1]}: invalid (int|float) value: 'none'", said)


FILES = [(name, kind) for name, parser in COMMANDS.items() if words_of(parser)[0] and name not in NO_FILE for kind in (
    "no/such/missing.jsonl", "folder", "empty.jsonl", "binary.jsonl", "/dev/null"
)]  # fmt: skip


@pytest.mark.parametrize(("command", "file"), FILES, ids=[f"{' '.join(c)} {f}" for c, f in FILES])
def test_a_file_that_is_none_is_named(command, file, refused, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 4)
    parser = COMMANDS[command]
    said = refused(command, *[file] * max(1, len(words_of(parser)[1])), *options_of(parser))
    if command in MAY_BE_EMPTY and file in ("empty.jsonl", "/dev/null"):
        assert said.startswith("--outputs is missing")
    else:
        assert file in said, said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trace kv-events tcp://127.0.0.1:5557", "--out is missing: name the file for the events, such as"),
        ("trace kv-events tcp://127.0.0.1:5557 x.txt", "--out x.txt must end in .jsonl"),
        (
            "certify ./simulator",
            "PROGRAM './simulator' cannot be started: No such file or directory; give a p",
        ),
        ("fleet run WORKLOAD --out FILE", "--out FILE is a file: name a folder"),
        ("hunt --workloads 1 --out FILE", "--out FILE is a file: name a folder"),
        ("certify os:getcwd --out FILE", "--out FILE is a file: name a folder"),
        ("fleet run WORKLOAD --plot x.png", "--plot x.png must end in .svg"),
        ("fleet compare WORKLOAD --plot x.png", "--plot x.png must end in .svg"),
        ("simulate WORKLOAD --out x.txt", "--out x.txt must end in .jsonl or .jsonl.gz"),
        ("simulate WORKLOAD --out folder.jsonl", "--out folder.jsonl is a folder: name a file"),
        ("trace whatif EXAMPLE --out x.txt", "--out x.txt must end in .jsonl or .jsonl.gz"),
        ("fleet run WORKLOAD --load-how x", "argument --load-how: invalid choice: 'x'"),
        (
            "bench --dataset-name sonnet --dataset-path BINARY",
            "BINARY is not text in UTF-8: invalid start byte",
        ),
        ("trace perfetto EXAMPLE none/x.json", "none/x.json: No such file or directory"),
    ],
)
def test_a_result_that_cannot_be_written_is_refused_before_the_work(words, said, refused, tmp_path):
    (tmp_path / "WORKLOAD").write_text(json.dumps({"requests": [{"id": "a", "prompt": [1, 2], "max_tokens": 2}]}))
    (tmp_path / "FILE").touch()
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "folder.jsonl").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "run.jsonl.gz")
    before = sorted(os.listdir())
    command, rest = (words.split()[:n] for n in (2, None))
    command = command if tuple(command) in COMMANDS else command[:1]
    arguments = [word.replace("EXAMPLE", "run.jsonl.gz") for word in rest[len(command) :]]
    assert refused(command, *arguments).startswith(said)
    assert sorted(os.listdir()) == before, "nothing is written"


def test_a_link_says_where_it_opens_and_keeps_its_line_to_itself(capsys, monkeypatch):
    monkeypatch.delenv("WORKBENCH_PLAYGROUND", raising=False)
    assert main(["trace", "link", str(EXAMPLE)]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 1 and told.out.startswith("http://127.0.0.1:5007/#run=")
    assert "`workbench playground`" in told.err
    assert main(["trace", "link", str(EXAMPLE), "--playground", "https://example.org/play/"]) == 0
    assert capsys.readouterr().err == ""
