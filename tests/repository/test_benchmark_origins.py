"""The origins of results on docs/benchmarks.md, and benchmarks on a machine that is busy."""

import json
import subprocess
import sys
from pathlib import Path

import benchmark_origins
import benchmark_tables
import make_benchmark_page
import pytest
from benchmark_origins import BENCHMARKS, CURRENT, NOT_RECORDED, OLDER, imported_files, origins, script_of

sys.path.insert(0, str(BENCHMARKS))
import _common

ROOT = Path(__file__).parents[2]


def test_a_script_measures_what_it_imports_at_any_depth():
    files = {str(file.relative_to(ROOT)) for file in imported_files(BENCHMARKS / "bench_scheduler.py")}
    assert {"benchmarks/bench_scheduler.py", "workbench/scheduler/block_pool.py"} <= files
    assert "workbench/kernels/cpu/emitter.py" not in files
    of_engine = {str(file.relative_to(ROOT)) for file in imported_files(BENCHMARKS / "bench_engine.py")}
    assert "workbench/kernels/cpu/emitter.py" in of_engine  # by way of workbench.Engine, and a string
    assert "workbench/kernels/cpu/layer_loop_code.py" in of_engine


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("engine", "engine"),
        ("serving_random_small", "serving"),
        ("serve", "serve"),
        ("prediction-cpu", "prediction"),
        ("partial_prefills_engine", "partial_prefills_engine"),
    ],
)
def test_each_result_has_a_script(name, script):
    assert script_of(name).name == f"bench_{script}.py"


def test_a_result_is_marked_when_a_file_it_measures_has_a_later_commit(monkeypatch):
    machine = {"processor": "one", "cores": 2, "load_average": 1.0}
    for result, times, state, date in (
        (machine, {"workbench/scheduler/scheduler.py": 50.0}, CURRENT, "committed 1970-01-01"),
        (machine, {"workbench/scheduler/scheduler.py": 150.0}, OLDER, "committed 1970-01-01"),
        (machine, {"workbench/viz/svg.py": 150.0}, CURRENT, "committed 1970-01-01"),
        (machine | {"date": "1970-01-01T00:02+00:00"}, {"workbench/scheduler/scheduler.py": 119.0}, CURRENT, "1970"),
        (machine | {"date": "1970-01-01T00:02+00:00"}, {"workbench/scheduler/scheduler.py": 121.0}, OLDER, "1970"),
    ):
        monkeypatch.setattr(benchmark_tables, "loaded", {"scheduler": {"machine": result}})
        monkeypatch.setattr(benchmark_origins, "loaded", {"scheduler": {"machine": result}})
        changes = {"benchmarks/results/scheduler.json": 100.0} | times
        monkeypatch.setattr(benchmark_origins, "last_changes", lambda changes=changes: changes)
        row = origins().splitlines()[-1]
        assert state in row and date in row, row


def test_every_number_of_the_page_has_an_origin():
    page = make_benchmark_page.PAGE.read_text()
    table = page[page.index("<!-- begin origins -->") : page.index("<!-- end origins -->")]
    for name in ("engine", "llama_cpp", "served", "checkouts", "speculation", "stalls"):
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert len([cell for cell in row.split("|")[1:-1] if cell.strip()]) == 8, row
    assert NOT_RECORDED not in table


@pytest.fixture
def others(monkeypatch):
    monkeypatch.setattr(_common, "others_before", [])
    monkeypatch.delenv(_common.BUSY, raising=False)

    def set_to(cores):
        monkeypatch.setattr(_common, "others_cpu", lambda seconds: cores)

    return set_to


def test_a_busy_machine_is_refused_unless_told_and_recorded(others, monkeypatch):
    others(0.1)
    _common.before_arm("ours")
    others(0.9)
    with pytest.raises(_common.BusyMachineError, match=r"0\.90 cores in the 3 s before 'ours', allowed are 0\.2"):
        _common.before_arm("ours")
    monkeypatch.setenv(_common.BUSY, "1")
    _common.before_arm("ours")
    machine = _common.machine()
    assert machine["other_processes"] == {"largest": 0.9, "each": [0.1, 0.9, 0.9]}
    assert machine["date"][:2] == "20"
    json.dumps(machine)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell the time of all processes")
def test_the_time_of_another_process_is_counted():
    """Of a process that computes for at least a second; others can only add to it."""
    program = "import time\nprint(flush=True)\nwhile time.process_time() < 60: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            spent = 0.0
            for _ in range(600):
                spent += 0.1 * _common.others_cpu(0.1)
                if spent > 0.5:
                    break
        finally:
            process.kill()
    assert spent > 0.5
