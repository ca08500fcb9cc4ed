"""The examples of each command's help work as they are printed, in a folder with the files that they name."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
from test_wrong_words import COMMANDS

from workbench import CostModel, simulate, simulate_fleet
from workbench.apps.cli import build_parser, main

COLUMNS = 80
COST = CostModel(fixed=0.01, per_sequence=2e-4, per_prefill_token=1e-4)
LENGTHS = [(20 + 37 * n % 400, 5 + 11 * n % 50) for n in range(40)]
CONFIG = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "num_blocks": 200}
WORKLOAD = {
    "config": CONFIG,
    "cost_model": COST.to_dict(),
    "requests": [
        {"id": f"r{n}", "prompt": {"len": prompt}, "max_tokens": output, "arrival_time": 0.05 * n}
        for n, (prompt, output) in enumerate(LENGTHS)
    ],
}
MANY = {
    "config": CONFIG,
    "cost_model": COST.to_dict(),
    "generate": {
        "num_requests": 150,
        "prompt": {"lognormal": {"median": 40, "sigma": 0.1, "max": 90}},
        "output": {"choices": [[1, 20], [3, 60]]},
        "arrivals": {"process": "poisson", "rate": 1},
    },
}
FILES = {
    "workload.json": Path("examples/workload.json").read_text(),
    "million.json": json.dumps(MANY),
    "access.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2026-01-01 00:00:{n:02}.0,{prompt},{output}\n" for n, (prompt, output) in enumerate(LENGTHS[:10])),
    "double.metal": "uint i = thread_position_in_grid.x;\ny[i] = 2 * x[i];\n",
    "vllm.log": "INFO 01-01 10:00:00 [loggers.py:248] Engine 000: Avg prompt throughput: 9.0 tokens/s, "
    "Avg generation throughput: 4.0 tokens/s, Running: 2 reqs, Waiting: 6 reqs, GPU KV cache usage: 99.0%, "
    "Prefix cache hit rate: 0.0%\n",
}
NOT_RUN = {
    r"trace watch": "it serves until Ctrl-C",
    r"serve": "it serves until Ctrl-C",
    r"demo": "it serves until Ctrl-C, or runs a model; tests of demo do both",
    r"trace kv-events|trace info events": "it needs a vLLM that publishes events",
    r"hunt|certify": "it searches for a minute, or needs other schedulers; tests/hunt and tests/certify run it",
    r"why http": "it needs a running server; tests of analysis/why_metrics run one",
    r"kernel check$": "it takes minutes; tests/attention checks these kernels",
    r"fleet compare measured": "it simulates nine fleets, half a minute; tests/fleet compares them",
    r"bench": "it needs a model and a data set; tests of bench run it",
    r"doctor smollm2": "it loads a model; tests of doctor run it",
    r"course slides": "it runs a notebook; tests/course makes slides",
    r"course grade": "it runs the notebooks of a class; tests/course grades copies",
}
"""Examples that are only parsed, by their beginnings, and why."""

NOT_WRAPPED = {("completion",): "a shell reads it", ("trace", "link"): "a link is one word"}
"""Commands whose lines may be longer than the terminal is wide, and why."""


def examples():
    """Every example, with the command whose help prints it."""
    for command, parser in COMMANDS.items():
        lines = (parser.epilog or "").replace("\\\n", " ").splitlines()
        for line in lines:
            if found := re.search(r"workbench (\S.*)", line):
                yield command, re.split(r" {3,}(?! *--)|\)| \|", found[1].replace("       --", " --"))[0].strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with every file that an example names."""
    made = tmp_path_factory.mktemp("examples")
    for name, content in FILES.items():
        (made / name).write_text(content)
    trace = simulate({**WORKLOAD, "cost_model": None}, cost_model=COST)
    for name in ("run.jsonl", "run.jsonl.gz", "measured.jsonl", "recording.jsonl.gz"):
        trace.save(made / name)
    simulate_fleet(WORKLOAD, replicas=2, router="vllm", cost_model=COST).save(made / "traces")
    return made


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_help_fits_the_terminal_and_its_examples_stay_commands(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", f"{COLUMNS}")
    parser = COMMANDS[command]
    shown = parser.format_help()
    assert max(map(len, shown.splitlines())) <= COLUMNS
    shown = re.sub(r" \\\n +", " ", shown)  # as a shell reads it
    for name, line in examples():
        if name == command:
            assert re.search(rf"workbench {re.escape(' '.join(line.split()))}( {{3}}|$|\)| \|)", shown, re.M), line


def test_there_are_examples_of_most_commands():
    assert len({command for command, _ in examples()}) >= 15 and len([*examples()]) >= 40


@pytest.mark.parametrize(("command", "line"), [*examples()], ids=[line for _, line in examples()])
def test_an_example_works(command, line, folder, monkeypatch, capsys):
    words = shlex.split(line.replace("/var/log/vllm-traces", "traces"))
    assert isinstance(build_parser(words[0]).parse_args(words), argparse.Namespace)
    if any(re.match(beginning, line) for beginning in NOT_RUN):
        return
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", f"{COLUMNS}")
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # processes take longer to start than these runs
    status = main(words)
    said = capsys.readouterr()
    assert status == 0, (said.out[-500:], said.err)
    assert said.out, "it answers"
    assert not re.search(r"\{'|\b[A-Z][a-z]\w*\((?!s\))|\bNone\b|\bTrue\b|\bFalse\b", said.out), "no Python"
    assert not re.search(r"\d,\d{3}\.\d|\b\d{4,} [a-z]|0% of 0 ", said.out), "numbers as people write them"
    if command not in NOT_WRAPPED:
        assert not [row for row in said.out.splitlines() if len(row) > COLUMNS]
