"""Tables on a terminal of 80 columns: no line is longer, so that no number is cut in two."""

import json
import re

import pytest

from workbench import CostModel, simulate
from workbench.apps.cli import main

COST = CostModel(fixed=0.01, per_sequence=2e-4, per_prefill_token=1e-4)
WORKLOAD = {
    "config": {"max_num_batched_tokens": 256, "max_num_seqs": 4, "num_blocks": 200},
    "requests": [
        {"id": f"r{n}", "prompt": {"len": 20 + 37 * n % 400}, "max_tokens": 5 + n, "arrival_time": 0.05 * n}
        for n in range(20)
    ],
}
SLOW = "a-client-that-was-slow"
COMMANDS = [
    "fleet compare run.jsonl.gz --routers round_robin,cache_aware --jobs 1",
    "fleet size run.jsonl.gz --slo ttft_p99=9s,tpot_p99=9s,itl_p99=9s --repeats 1",
    "fleet size run.jsonl.gz --slo ttft_p99=9s,tpot_p99=9s,itl_p99=9s --load 1x,2x",
    "trace diff run.jsonl.gz other.jsonl.gz",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_fits_the_terminal(command, tmp_path, monkeypatch, capsys):
    """Columns that have no room stand below, beside the same titles; blocks come only where these do not help."""
    monkeypatch.chdir(tmp_path)
    for name, seats in (("run", 4), ("other", 3)):
        config = WORKLOAD["config"] | {"num_blocks": 32, "max_num_seqs": seats}
        simulate({**WORKLOAD, "config": config}, cost_model=COST).save(f"{name}.jsonl.gz")

    def title(row):
        return row[: 2 if row[0] == "*" else 1]  # a layout on the Pareto front

    def cells(columns):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(command.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= int(columns)
        return [re.split(" {2,}", line.strip()) for line in lines]

    wide, narrow = cells("250"), cells("80")
    rows = [row for row in wide if len(row) > 6]
    assert len(rows) >= 2
    for whole in rows:
        pieces = [row for row in narrow if len(row) > 2 and title(row) == title(whole)]
        assert len(pieces) in (2, 3, 4) and {cell for piece in pieces for cell in piece} == {*whole}
        assert sum(map(len, pieces)) > len(whole), "each begins with the title"
    monkeypatch.setenv("COLUMNS", "30")
    assert main(command.split()) == 0
    blocks = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"  {rows[0][-2]}") for line in blocks)


@pytest.mark.parametrize("change", ["", "--set max_num_seqs=8"])
def test_a_prediction_is_two_tables_of_the_same_cells(change, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    simulate(WORKLOAD, cost_model=COST).save("run.jsonl.gz")
    command = f"trace whatif run.jsonl.gz {change}".split()

    def rows(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(command) == 0
        lines = capsys.readouterr().out.split("\nnote: ")[0].splitlines()
        assert max(map(len, lines)) <= columns
        return [re.split(" {2,}", line.strip().replace(" tokens/s", "/s")) for line in lines]

    wide, narrow = {row[0]: row for row in rows(200)}, rows(80)
    behind = narrow.index(["now", "predicted", "recorded", "off by"])
    ahead, behind = {row[0]: row for row in narrow[: behind - 1]}, {row[0]: row for row in narrow[behind + 1 :]}
    assert {"ttft_p99", "output_throughput", "peak_kv_use"} <= ahead.keys() == behind.keys() | {"predicted"}
    for name, row in wide.items():
        if name in ahead:
            assert row == [*(cell for cell in ahead[name] if cell != "!"), *behind[name][2:]]
            assert (row[-1] == "!") == (ahead[name][-1] == "!")


@pytest.mark.parametrize("command", ["trace narrate", "trace info", "simulate", "trace diff"])
def test_sentences_fit_the_terminal(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    simulate(WORKLOAD, cost_model=COST).save("run.jsonl.gz")
    (tmp_path / "a-workload-with-a-long-name.json").write_text(json.dumps(WORKLOAD))
    files = {"simulate": ["a-workload-with-a-long-name.json"], "trace diff": ["run.jsonl.gz"] * 2}
    assert main([*command.split(), *files.get(command, ["run.jsonl.gz"])]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("what", ["", "--slowest 20", "--slowest 20 --by e2e", f"{SLOW}-r7", f"{SLOW}-r0 r9"])
def test_an_explanation_is_as_wide_as_columns_says_also_in_a_pipe(what, width, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    requests = [{**each, "id": f"{SLOW}-{each['id']}"} for each in WORKLOAD["requests"]]
    trace = simulate({**WORKLOAD, "requests": [*requests[:-11], *WORKLOAD["requests"][9:]]}, cost_model=COST)
    trace.save("run.jsonl.gz")
    command = ["trace", "explain", "run.jsonl.gz", *what.split()]
    assert main(command) == 0
    wide = capsys.readouterr().out
    assert max(map(len, wide.splitlines())) > 40
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(command) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= width
    assert set(wide.split()) - {"request", "cause"} <= set(narrow.split()), "the same words, none cut"
