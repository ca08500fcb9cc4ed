"""`workbench hunt` on a policy in the current folder: it is found there, and its bug is reported as its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

POLICIES = {
    "of what it is shown": "return sorted(view.waiting, key=lambda request: request.nonsense)",
    "of a module that it calls": "return json.loads('no JSON')",
    "of its answer": "return view.waiting[5:6] or self.nothing",
}


def workbench_in(folder, *words):
    """Run the installed command, which does not look into the current folder by itself."""
    env = {**os.environ, "PYTHONPATH": str(Path(workbench.__file__).parents[1])}
    command = [sys.executable, "-P", "-m", "workbench", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def write_policy(folder, body):
    text = "import json\n\nfrom workbench import SchedulingPolicy\n\n\nclass MyPolicy(SchedulingPolicy):\n"
    (folder / "mine.py").write_text(f"{text}    def waiting_order(self, view):\n        {body}\n")


@pytest.mark.parametrize("body", POLICIES.values(), ids=POLICIES)
def test_a_bug_of_a_policy_is_told_once_and_as_its_own(body, tmp_path):
    write_policy(tmp_path, body)
    done = workbench_in(tmp_path, "hunt", "--policy", "mine:MyPolicy", "--workloads", "20", "--out", "found")
    assert done.returncode == 1, done.stderr
    (name,) = json.loads(done.stdout)["findings"]
    assert name.startswith("crash-mine-py-return")
    assert done.stderr.count("Traceback (most recent call last)") == 1 + done.stderr.count("During handling")
    assert "at mine.py:8: return" in done.stderr and "1 finding," in done.stderr
    report = (tmp_path / "found" / name / "report.md").read_text()
    assert report.startswith("# mine:MyPolicy in workbench ") and "**Place**: mine.py: return" in report
    assert re.search(r"`python -m pytest test_finding.py` shows it; it needs [^{}]+ and pytest", report)
    page = (tmp_path / "found" / name / "page.html").read_text()
    assert "Step 0 crashed" in page and "breaks the law of crash" not in page


def test_a_misspelt_method_of_a_policy_ends_a_hunt_before_it_begins(tmp_path):
    text = "from workbench import SchedulingPolicy\n\n\nclass MyPolicy(SchedulingPolicy):\n"
    (tmp_path / "mine.py").write_text(f"{text}    def waiting_odrer(self, view):\n        return view.waiting\n")
    done = workbench_in(tmp_path, "hunt", "--policy", "mine:MyPolicy", "--workloads", "20", "--out", "found")
    assert done.returncode == 2 and "(did you mean waiting_order?)" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_scheduler_of_the_current_folder_is_hunted(tmp_path):
    (tmp_path / "mine.py").write_text("from workbench.analysis.hunt.own import OwnScheduler as make\n")
    done = workbench_in(tmp_path, "hunt", "--scheduler", "mine:make", "--workloads", "5", "--out", "found")
    assert "cannot be imported" not in done.stderr and json.loads(done.stdout)["workloads"] == 5


def test_a_replay_and_the_folder_of_a_finding_bring_no_code(tmp_path):
    """A finding comes from others: no module beside it is imported, even if its name is typed."""
    write_policy(tmp_path, "return view.waiting")
    (tmp_path / "finding.json").write_text('{"scheduler": "workbench", "law": "crash", "policy": "mine:MyPolicy"}')
    (tmp_path / "workload.json").write_text('{"requests": [{"id": "a", "prompt": [1], "max_tokens": 1}]}')
    for words in (["--out", "found", "--workloads", "1"], ["replay", "."]):
        done = workbench_in(tmp_path, "hunt", "--policy", "mine:MyPolicy", *words)
        assert done.returncode == 2 and "'mine:MyPolicy' cannot be imported" in done.stderr
    (tmp_path / "finding.json").rename(tmp_path / "case.json")
    (tmp_path / "case").mkdir()
    (tmp_path / "case.json").rename(tmp_path / "case" / "finding.json")
    (tmp_path / "workload.json").rename(tmp_path / "case" / "workload.json")
    done = workbench_in(tmp_path, "hunt", "replay", "case", "--policy", "mine:MyPolicy")
    assert done.returncode == 2 and "a replay looks at PYTHONPATH" in done.stderr
