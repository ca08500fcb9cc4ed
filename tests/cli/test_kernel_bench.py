"""`workbench kernel bench`: settings of MLX are measured in turns, and recommended only by that measurement."""

import json

import pytest

from workbench.apps.cli import kernel_bench, main
from workbench.apps.cli.kernel_bench import VARIABLE, WRITES, advice, recommended, remembered_advice, table
from workbench.base.cache_folder import cached, make_folder


def measured(default, many, some=None):
    times = {"as MLX has it": default, f"{VARIABLE}=500": some or default, f"{VARIABLE}=2000": many}
    return {name: dict.fromkeys(WRITES, values) for name, values in times.items()}


@pytest.mark.parametrize(
    ("default", "many", "chosen"),
    [
        ([10.0, 10.2, 10.1], [9.4, 9.5, 9.6], {VARIABLE: "2000"}),
        ([10.0, 10.2, 10.1], [9.9, 9.95, 9.9], {}),  # less than 2%
        ([10.0, 10.2, 9.0], [9.4, 9.5, 9.6], {}),  # rounds differ by more
        ([10.0, 10.2, 10.1], [11.0, 11.0, 11.0], {}),
    ],
)
def test_a_setting_is_recommended_only_if_it_is_faster(default, many, chosen):
    found = measured(default, many)
    assert recommended(found) == chosen
    assert (f"{VARIABLE}=2000" in advice(recommended(found))) == bool(chosen)
    assert len(table(found).splitlines()) == 4


def test_every_setting_runs_and_is_remembered(capsys, monkeypatch, tmp_path):
    """Each in another process: MLX reads the variable once."""
    compiled = cached("compiled")
    make_folder(compiled)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    (tmp_path / "compiled").symlink_to(compiled)
    assert remembered_advice() == ""
    environments, run = [], kernel_bench.subprocess.run

    def spied(command, env, **options):
        environments.append(env.get(VARIABLE))
        return run(command, env=env, **options)

    monkeypatch.setattr(kernel_bench.subprocess, "run", spied)
    assert main(["kernel", "bench", "--layers", "1", "--rounds", "1"]) == 0
    assert environments == [None, "500", "2000"]
    text = capsys.readouterr().out
    assert all(part in text for part in ("two writes", "one write", f"{VARIABLE}=2000", "on a CPU"))
    kept = json.loads((tmp_path / "kernel-bench.json").read_text())
    assert all(time > 0 for by_write in kept["milliseconds"].values() for times in by_write.values() for time in times)
    assert remembered_advice() == advice(kept["recommended"])
    kept["machine"][-1] = "another MLX"
    (tmp_path / "kernel-bench.json").write_text(json.dumps(kept))
    assert remembered_advice() == ""
