"""Scheduling, simulating, comparing and drawing need msgspec alone: a web page has neither numpy nor MLX."""

import json
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from workbench import simulate
from workbench.trace.readings.metrics import Distribution
from workbench.viz.layout.packet import decode_packet

ABSENT = ("numpy", "mlx", "mlx_lm", "tqdm", "panel", "bokeh", "transformers", "tokenizers", "numba", "anywidget")
ABSENT += ("IPython", "ipywidgets", "traitlets", "tornado", "pandas", "multiprocessing", "greenlet")

RUN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import json, tempfile, pathlib
from workbench import EngineConfig, Trace, simulate
from workbench.scheduler.policies import ShortestRemainingFirst
from workbench.simulation.costs.cost_model import CostModel
from workbench.analysis.explain import explain
from workbench.analysis.fork import fork
from workbench.simulation.simulate import simulate_requests
from workbench.analysis.sweep import sweep
from workbench.trace.readings.compare import compare
from workbench.trace.readings.narrate import narrate
from workbench.viz.export_html import html_page
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import encode_other
from workbench.viz.layout.packet import encode_packet

workload = json.loads(sys.argv[1])
trace = simulate(workload)
other = fork(trace, max_num_batched_tokens=32)
shortest = simulate(workload, policy=ShortestRemainingFirst())
folder = pathlib.Path(sys.argv[2])
trace.save(folder / "run.jsonl")
assert len(Trace.load(folder / "run.jsonl")) == len(trace)
(folder / "packet").write_bytes(encode_packet(columns_of(trace)))
(folder / "other").write_bytes(encode_other(trace, other))
assert "<main" in html_page(trace, other=other)
rows = sweep(workload, {"max_num_batched_tokens": [32, 64]}, jobs=1)
facts = {
    "summary": repr(trace.metrics()),
    "comparison": repr(compare(trace, other)),
    "explain": repr(explain(trace, "long", CostModel.from_dict(workload["cost_model"]))),
    "narrate": narrate(trace[2]),
    "rows": rows,
    "shortest": len(shortest),
    "fit": str(trace.whatif(max_num_seqs=2).metrics()),
    "tuned": repr(trace.tune("ttft_p95=1s", grid={"max_num_seqs": [2, 4]})),
    "slice": len(trace[3:]),
}
print(json.dumps(facts))
assert trace.explain("long").total > 0  # without a fit
try:
    trace.metrics().steps
except ModuleNotFoundError as problem:
    assert "numpy" in str(problem)
else:
    raise AssertionError("numpy is not absent")
"""

WORKLOAD = {
    "config": {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_blocks": 24},
    "cost_model": {"fixed": 0.01, "per_prefill_token": 0.0002, "per_kv_token": 1e-6},
    "requests": [
        {"id": "long", "prompt": {"len": 150}, "max_tokens": 30},
        *[{"id": f"r{i}", "prompt": {"len": 20 + 7 * i}, "max_tokens": 12, "arrival_time": 0.02 * i} for i in range(9)],
    ],
}


def run(absent, folder):
    code = RUN if absent else RUN.replace("sys.meta_path.insert", "list().insert").partition("try:")[0]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("ABSENT", repr(absent)), json.dumps(WORKLOAD), folder],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_same_results_with_msgspec_alone(tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    assert run(ABSENT, tmp_path / "without") == run((), tmp_path / "with")
    for name in ("run.jsonl", "packet", "other"):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes(), name
    header, columns = decode_packet((tmp_path / "without" / "packet").read_bytes())
    assert header["num_steps"] == len(columns["time"]) > 10


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1001])
def test_a_distribution_is_numpys(count):
    values = np.random.default_rng(count).lognormal(size=count)
    found = Distribution.of(values.tolist())
    assert [found.p50, found.p95, found.p99] == np.percentile(values, [50, 95, 99]).tolist()
    assert found.mean == pytest.approx(values.mean(), rel=1e-12) and found.max == values.max()
    assert Distribution.of([]) == Distribution(0)


def test_the_summary_is_that_of_the_columns():
    metrics = simulate(WORKLOAD).metrics()
    summary, steps = metrics.summary, metrics.steps
    assert isinstance(metrics.columns["step"], array)
    assert summary.num_scheduled_tokens == steps.num_tokens.sum() > 0
    assert summary.mean_budget_use == pytest.approx(steps.budget_use[steps.num_tokens > 0].mean(), rel=1e-12)
    assert summary.mean_kv_use == pytest.approx(steps.kv_use.mean(), rel=1e-12)
    assert summary.peak_kv_use == steps.kv_use.max() > 0
    for request in metrics.requests.values():
        assert request.gaps("steps") == request.itl_steps.tolist()
        assert request.gaps("s") == [b - a for a, b in pairwise(request.token_times)] == request.itl_seconds.tolist()


NOTEBOOK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import ast, json
names = {"__name__": "notebook"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code" or "model" in cell["metadata"].get("tags", []) or ".watch(" in source:
        continue
    *first, last = ast.parse(source).body
    exec(compile(ast.Module(first, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        getattr(shown, "_repr_html_", str)()
    else:
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
"""


@pytest.mark.parametrize("name", ["06_partial_prefills", "11_own_policy", "12_recordings"])
def test_notebooks_that_run_in_a_web_page_need_it_in_cells_with_a_model_only(name):
    folder = Path(__file__).parents[1] / "notebooks"
    program = NOTEBOOK.replace("ABSENT", repr(ABSENT))
    done = subprocess.run(
        [sys.executable, "-c", program, f"{name}.ipynb"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
