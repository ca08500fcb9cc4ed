"""A command line that a shell completes: bash and zsh, in a terminal."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbench import EngineConfig, simulate
from workbench.analysis.fleet.routers import ROUTERS
from workbench.apps.cli import COMMANDS, build_parser, main
from workbench.apps.cli.completion import SHELLS, _actions, _completer
from workbench.apps.cli.settings import config_fields, vllm_fields
from workbench.trace.laws import LAWS

pexpect = pytest.importorskip("pexpect", reason="no pseudoterminals on this system")

START = {
    "bash": "bind 'set enable-bracketed-paste off'; bind 'set show-all-if-ambiguous on'; bind 'set bell-style none'",
    "zsh": "unsetopt PROMPT_SP BEEP; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D",
}
OPTIONS = {"bash": ["--norc", "--noprofile"], "zsh": ["-f", "-i"]}

LINES = [
    ("workbench compl", "workbench completion "),
    ("workbench trace exp", "workbench trace explain "),
    ("workbench trace info a-r", "workbench trace info a-run.jsonl.gz "),
    ("workbench trace explain a-run.jsonl.gz fi", "workbench trace explain a-run.jsonl.gz first "),
    ("workbench trace explain a-run.jsonl.gz x", r"a-run.jsonl.gz x\$\(touch\ planted\) "),
    ("workbench trace explain a-run.jsonl.gz --by e", "workbench trace explain a-run.jsonl.gz --by e2e "),
    ("workbench trace whatif a-run.jsonl.gz --set enable_p", "--set enable_prefix_caching="),
    ("workbench serve --set enable_prefix_caching=t", "--set enable_prefix_caching=true "),
    ("workbench simulate w.json --sweep policy=fcfs,pr", "--sweep policy=fcfs,priority "),
    ("workbench trace tune a-run.jsonl.gz --slo tpot_me", "--slo tpot_mean="),
    ("workbench hunt --only progress,bl", "--only progress,blocks "),
    ("workbench hunt --scheduler vl", "workbench hunt --scheduler vllm "),
    ("workbench serve --kv-cache-dtype int", "workbench serve --kv-cache-dtype int8_per_token_head "),
    ("workbench notebooks --fo", "workbench notebooks --force "),
]
"""Lines as they are typed before a Tab, and what stands there after it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a recording, and with the command in ``bin``."""
    path = tmp_path_factory.mktemp("shell")
    requests = [{"id": name, "prompt": [1, 2], "max_tokens": 2} for name in ("first", "x$(touch planted)")]
    simulate({"requests": requests}).save(path / "a-run.jsonl.gz")
    (path / "bin").mkdir()
    command = path / "bin" / "workbench"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m workbench "$@"\n')
    command.chmod(0o755)
    return path


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_the_line(shell, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}
    terminal = pexpect.spawn(
        shell, OPTIONS[shell], env=environment, cwd=folder, encoding="utf-8", timeout=120, dimensions=(50, 200)
    )
    try:
        terminal.sendline(f"{START[shell]}; source <(workbench completion {shell}); echo re''ady")
        terminal.expect("ready\r\n")
        for typed, completed in LINES:
            terminal.send(f"{typed}\t")  # echoed without the Tab, and then with what stands there
            terminal.expect_exact(completed)
            terminal.sendcontrol("u")  # an empty line again
    finally:
        terminal.close(force=True)
    assert not (folder / "planted").exists()


def test_fish_completes_the_line(folder):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    asks = [f"complete -C '{typed}'" for typed, _ in LINES]
    finished = subprocess.run(
        ["fish", "--no-config", "-c", "workbench completion fish | source", "-c", "; ".join(asks)],
        **{"env": environment, "cwd": folder, "capture_output": True, "text": True, "timeout": 120},
    )
    offered = [line.partition("\t")[0] for line in finished.stdout.splitlines()]
    assert offered == [
        *("completion", "explain", "a-run.jsonl.gz", "first", "x$(touch planted)", "e2e"),
        *("enable_prefix_caching=", "enable_prefix_caching=true", "policy=fcfs,priority", "tpot_mean="),
        *("progress,blocks", "vllm"),
        *("int8_per_token_head", "--force"),
    ]


def asked(line, cwd):
    """The completions of a line, as the script asks for them."""
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(cwd / "answer"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-m", "workbench"]
    finished = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert finished.stdout == ""
    return (cwd / "answer").read_text().split("\n")


def test_what_is_offered(folder):
    assert [word.strip() for word in asked("workbench ", folder)] == list(COMMANDS)
    assert asked("workbench serve --set ", folder) == [f"{name}=" for name in config_fields()]
    assert asked("workbench trace whatif a-run.jsonl.gz --set ", folder) == [f"{name}=" for name in vllm_fields()]
    assert asked("workbench serve --port ", folder) == [""], "nobody can list ports"
    assert "a-run.jsonl.gz" in "".join(asked("workbench why ", folder)), "a source may be a file"
    assert asked("workbench trace explain 'a-run.jso", folder) == ["a-run.jsonl.gz"], "a quotation may be open"
    assert asked("workbench trace explain none.jsonl ", folder) == [""]
    (folder / "bad.jsonl").write_text("{")
    assert asked("workbench trace explain bad.jsonl ", folder) == [""]


def test_routers_are_offered_and_named_in_the_help(folder):
    for command in ("run", "size"):
        assert asked(f"workbench fleet {command} a-run.jsonl.gz --router cache", folder) == ["cache_aware "]
        assert asked(f"workbench fleet {command} a-run.jsonl.gz --router ", folder) == list(ROUTERS)
    asked_last = asked("workbench fleet compare a-run.jsonl.gz --routers sticky,cache", folder)
    assert [word.strip() for word in asked_last] == ["sticky,cache_aware"]
    for command, word, others in (
        ("fleet compare a-run.jsonl.gz --routers", "round_robin", ROUTERS),
        ("hunt --only", LAWS[0].name, [law.name for law in LAWS]),
        ("simulate w.json --sweep", "policy=fcfs", ("policy=fcfs", "policy=priority")),
    ):
        left = [each.partition("=")[2] or each for each in others if each != word]
        assert [each.strip() for each in asked(f"workbench {command} {word},", folder)] == [f"{word},{x}" for x in left]
    told = [action.help for action in _actions(build_parser("fleet")) if action.dest in ("router", "routers")]
    assert len(told) == 3 and all(", ".join(ROUTERS) in help for help in told)


def test_each_path_is_completed_with_files_or_folders():
    """And no number is: an option that is added is of a kind that the rules know."""
    files, folders = (lambda **_: ("file",)), (lambda **_: ("folder",))
    for action in _actions(build_parser()):
        completer = _completer(action, files, folders)
        assert (completer in (files, folders)) == (
            action.type is Path
            or action.dest in ("model", "draft_model", "chat_template", "source", "trace", "program", "python")
            or action.dest in ("tls_cert", "tls_key", "api_key_file", "access_log")
        ), action
        if action.metavar in ("DIR", "FOLDER"):
            assert completer is folders


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_names_the_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert re.search(r"complete .*workbench", script) and "_ARGCOMPLETE" in script


def test_without_argcomplete_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 2
    expected = (
        "workbench completion needs the extra completion (argcomplete is not installed): "
        "pip install 'inference-workbench[completion]'\n"
    )
    assert capsys.readouterr().err == expected
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit):  # a script that outlives the package runs no command
        main(["demo"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", [["serve", "--set"], ["trace", "whatif", "--set"], ["simulate", "--sweep"]])
def test_help_lists_the_fields_with_their_defaults(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "help"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0
    fields = {"serve": config_fields(), "trace": vllm_fields(), "simulate": {**config_fields(), "rate": ()}}[command[0]]
    recorded = ["A field that is not set keeps its recorded value; the defaults are those of an engine."]
    kept, lines = [line for line in lines if line in recorded], [line for line in lines if line not in recorded]
    assert kept == (recorded if command[0] == "trace" else [])
    assert [line.split()[0] for line in lines[1:-1]] == list(fields)
    assert next(line.split() for line in lines if line.startswith("policy ")) == ["policy", "fcfs", "fcfs", "priority"]
    assert next(line.split() for line in lines if line.startswith("num_blocks "))[:2] == ["num_blocks", "512"]


def test_fields_and_words_are_those_of_the_configuration():
    assert set(config_fields()) == set(EngineConfig().to_dict())
    assert config_fields()["num_blocks"] == ("auto",) and config_fields()["max_model_len"] == ("none",)
    for name, words in config_fields().items():
        if words == ("true", "false"):
            assert getattr(EngineConfig(), name) in (True, False), name


def test_the_short_form_of_out_is_one_wherever_out_is():
    found = 0
    for name in COMMANDS:
        for action in _actions(build_parser(name)):
            if "--out" in action.option_strings:
                assert "-o" in action.option_strings, (name, action)
                found += 1
    assert found > 10
