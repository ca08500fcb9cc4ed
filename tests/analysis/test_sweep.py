"""Sweeps: grid, table, Pareto front, plot, and the command."""

import csv
import json
import sys
from xml.etree import ElementTree

import pyarrow.parquet
import pytest

from workbench.analysis.sweep import mark_pareto, read_grid, read_settings, save_table, sweep
from workbench.apps.cli import main
from workbench.trace import Trace
from workbench.viz.pareto import pareto_svg

WORKLOAD = {
    "config": {"max_num_batched_tokens": 512, "num_blocks": 2000, "max_num_seqs": 32},
    "cost_model": {"fixed": 0.004, "per_prefill_token": 5e-5, "per_sequence": 2e-5},
    "generate": {
        "num_requests": 80,
        "prompt": {"choices": [[9, 40], [1, 1500]]},
        "output": 12,
        "arrivals": {"process": "poisson", "rate": 60},
    },
}


@pytest.fixture
def workload_file(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


def test_the_rate_may_be_swept_if_the_workload_has_no_arrivals():
    workload = {**WORKLOAD, "generate": {**WORKLOAD["generate"], "num_requests": 3, "arrivals": None}}
    assert [row["end"] for row in sweep(workload, {"rate": [5, 50]}, jobs=1)] == ["done", "done"]


def test_grid_from_settings():
    grid = read_grid(["max_num_batched_tokens=256,512", "max_num_partial_prefills=none,4", "policy=fcfs,priority"])
    assert grid == {
        "max_num_batched_tokens": [256, 512],
        "max_num_partial_prefills": [None, 4],
        "policy": ["fcfs", "priority"],
    }
    for words, message in (
        (["x=1"], "unknown field 'x'; --sweep help lists all 33 fields"),
        (["rate="], "must be FIELD"),
        (["rate=1"] * 2, "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            read_grid(words)


def test_settings_have_one_value_each_which_may_be_json():
    settings = read_settings(["max_num_seqs=4", "policy=priority", 'speculative={"method": "ngram", "min": [1, 2]}'])
    assert settings == {"max_num_seqs": 4, "policy": "priority", "speculative": {"method": "ngram", "min": [1, 2]}}
    for words, message in (
        (["x=1"], "--set 'x=1': unknown field 'x'; --set help lists all 32 fields"),
        (["seed="], "must be"),
        (["seed=1"] * 2, "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            read_settings(words)


def test_rows_front_table_and_plot(tmp_path):
    rows = sweep(WORKLOAD, {"max_num_batched_tokens": [64, 512], "max_num_partial_prefills": [None, 100]}, jobs=2)
    assert [(row["max_num_batched_tokens"], row["max_num_partial_prefills"]) for row in rows] == [
        (64, None), (64, 100), (512, None), (512, 100)
    ]  # fmt: skip
    assert "max_num_partial_prefills must be from 1 to 64 " in rows[1]["error"] and not rows[1]["pareto"]
    done = [rows[0], rows[2], rows[3]]
    assert all(row["end"] == "done" and row["num_finished"] == 80 and not row["error"] for row in done)
    assert any(row["pareto"] for row in rows)
    save_table(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert float(read[0]["ttft_mean"]) == rows[0]["ttft_mean"] and read[1]["error"] == rows[1]["error"]
    save_table(rows, tmp_path / "rows.parquet")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == [
        {name: row.get(name) for name in columns} for row in rows
    ]
    with pytest.raises(ValueError, match=r"must end in \.csv or \.parquet"):
        save_table(rows, tmp_path / "rows.xlsx")
    svg = ElementTree.fromstring(pareto_svg(rows, ["max_num_batched_tokens"]))
    assert len(svg.findall(".//{*}circle")) == 2 * 3  # one per run and panel; the invalid run has none


def test_a_parquet_file_without_pyarrow_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"rows\.parquet: a \.parquet file needs pyarrow .* use \.csv"):
        save_table([{"a": 1}], tmp_path / "rows.parquet")
    assert not list(tmp_path.iterdir())


def test_pareto_front():
    def row(ttft, itl, throughput, end="done"):
        return {"ttft_mean": ttft, "itl_mean": itl, "output_throughput": throughput, "end": end}

    rows = [row(1, 9, 5), row(2, 8, 5), row(2, 9, 5), row(9, 9, 6), row(0, 0, 9, end="stuck"), row(1, 9, 5), {}]
    assert [row["pareto"] for row in mark_pareto(rows)] == [True, True, False, True, False, True, False]


def test_impossible_sweeps():
    with pytest.raises(ValueError, match="give the workload a cost_model"):
        sweep({"requests": []}, {"max_num_seqs": [1]})
    with pytest.raises(ValueError, match="0 combinations"):
        sweep(WORKLOAD, {})
    with pytest.raises(ValueError, match=r"generate\.arrivals"):
        sweep({"requests": [], "cost_model": {"fixed": 1}}, {"rate": [1, 2]})
    with pytest.raises(ValueError, match="nothing to plot"):
        pareto_svg([{"error": "x"}], [])


def test_the_command_sweeps(workload_file, tmp_path, capsys):
    out, plot = tmp_path / "s.csv", tmp_path / "s.svg"
    arguments = ["simulate", str(workload_file), "--sweep", "rate=20,60", "--jobs", "1", "--out", str(out), "--plot"]
    assert main([*arguments, str(plot)]) == 0
    printed = capsys.readouterr().out
    rows = {cells[0]: cells for line in printed.splitlines() if (cells := line.replace("*", " ").split())}
    assert rows["20"][-1] == "done" and len(rows["20"]) == len(rows["60"]) and "on the Pareto front" in printed
    assert len(out.read_text().splitlines()) == 3 and plot.read_text().startswith("<svg")


def test_the_command_runs_at_scale_and_keeps_a_stretch(workload_file, tmp_path, capsys):
    assert main(["simulate", str(workload_file)]) == 0
    assert "80 of 80 requests" in capsys.readouterr().out
    part = tmp_path / "part.jsonl"
    assert main(["simulate", str(workload_file), "--record", "20:30", "--out", str(part)]) == 0
    trace = Trace.load(part)
    assert len(trace) == 10 and trace[0].step == 20
    whole = tmp_path / "whole.jsonl"
    assert main(["simulate", str(workload_file), "--out", str(whole)]) == 0
    assert len(Trace.load(whole)) > 30


def test_the_command_fits_a_cost_model_to_a_trace(workload_file, tmp_path, capsys):
    measured = tmp_path / "measured.jsonl"
    main(["simulate", str(workload_file), "--trace", str(measured)])
    assert main(["simulate", str(workload_file), "--cost-from", str(measured)]) == 0
    assert "the median error is 0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "2"], "--jobs belongs to a sweep"),
        (["--out", "x.csv"], "--out belongs to a sweep"),
        (["--sweep", "rate=1", "--out", "x.jsonl"], "--sweep keeps no steps"),
        (["--sweep", "rate=1", "--out", "x.txt"], "--out x.txt must end in .csv"),
        (["--sweep", "rate=1", "--plot", "x.png"], "--plot x.png must end in .svg"),
        (["--sweep", "rate=1", "--jobs", "0"], "--jobs must be >= 1"),
        (["--record", "1:2"], "--record needs --out"),
        (["--record", "9:2", "--out", "x.jsonl"], "FIRST below LAST"),
    ],
)
def test_bad_options_are_one_line(workload_file, capsys, arguments, message):
    assert main(["simulate", str(workload_file), *arguments]) == 2
    problem = capsys.readouterr().err
    assert message in problem and len(problem.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": []}, "either requests or generate"),
        ({"cost_model": None}, "generated requests arrive at times: give a cost_model"),
        ({"cost_model": {"fixed": "x"}}, "fixed must be a number"),
        ({"generate": {}}, "generate.num_requests must be an integer"),
        ({"speed": 1}, "workload has an unknown field 'speed'"),
    ],
)
def test_malformed_generated_workloads(workload_file, capsys, change, message):
    workload_file.write_text(json.dumps(WORKLOAD | change))
    assert main(["simulate", str(workload_file)]) == 2
    assert message in capsys.readouterr().err
