"""`scripts/run_benchmarks.py` knows every script, and measures only what is older than the code."""

import subprocess
import sys
from pathlib import Path

import pytest
import run_benchmarks
from run_benchmarks import BENCHMARKS, BY_HAND, SAVED, is_current

ROOT = Path(__file__).parents[2]


def test_every_script_is_run_or_has_a_reason():
    scripts = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert scripts == {*BENCHMARKS, *BY_HAND} and not {*BENCHMARKS} & {*BY_HAND}


def test_results_have_the_names_that_scripts_save():
    for name in BENCHMARKS:
        for result in SAVED.get(name, (name,)):
            assert (ROOT / "benchmarks/results" / f"{result}.json").exists(), result


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one script and no result; `commit` commits everything at a time."""

    def commit(seconds):
        date = f"@{seconds} +0000"
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
        command = ["git", *who, "commit", "-q", "-m", "x", "--date", date]
        subprocess.run(command, cwd=tmp_path, check=True, env={"GIT_COMMITTER_DATE": date, "PATH": "/usr/bin:/bin"})

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for folder in ("workbench", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "workbench/a.py").write_text("1")
    (tmp_path / "benchmarks/bench_scheduler.py").write_text(
        "import pathlib\npathlib.Path('benchmarks/results/scheduler.json').write_text('{}')"
    )
    monkeypatch.setattr(run_benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(run_benchmarks, "before_arm", lambda name: None)
    monkeypatch.setattr(run_benchmarks, "RESULTS", tmp_path / "benchmarks/results")
    commit(1_000_000_000)
    return tmp_path, commit


def test_a_result_is_measured_once_and_again_after_a_change(repository, monkeypatch, capfd):
    folder, commit = repository
    result = folder / "benchmarks/results/scheduler.json"

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "scheduler", *words])
        status = run_benchmarks.main()
        return status, capfd.readouterr().out.splitlines()[-1]

    assert not is_current("scheduler")
    assert main("--list") == (0, "scheduler: to run") and not result.exists()
    assert main()[0] == 0 and result.exists()
    assert is_current("scheduler")  # written after the commit of the code
    assert main() == (0, "scheduler: its results are newer than the code")
    assert main("--again")[1].endswith(" s")
    commit(1_000_000_100)
    assert is_current("scheduler")  # committed after it, whatever the time of the checkout
    (folder / "workbench/a.py").write_text("2")
    assert not is_current("scheduler")
    commit(1_000_000_200)
    assert not is_current("scheduler")
    (folder / "benchmarks/bench_scheduler.py").write_text("raise SystemExit(3)")
    assert main() == (1, "scheduler: FAILED")
