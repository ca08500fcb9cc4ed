"""The files in examples/ show what their README says."""

import re
from pathlib import Path

from workbench import Trace, simulate
from workbench.apps.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECORDING = EXAMPLES / "vllm_preemption.jsonl.gz"


def test_the_readme_names_every_example_and_no_other():
    named = set(re.findall(r"^\| `([^`]+?)/?` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


def test_a_document_delays_a_chat_and_is_found_again():
    trace = simulate(EXAMPLES / "workload.json")
    assert trace.end == "done" and len(trace.requests) == 5
    assert "document" in trace.explain("chat-3").ttft.biggest_avoidable.culprits
    cached = {name: request.num_cached_tokens for name, request in trace.metrics().requests.items()}
    assert cached["again"] == 1400 // 16 * 16 and sum(cached.values()) == cached["again"]
    assert not trace.check()


def test_the_recording_is_of_vllm_and_preempts_three_times():
    trace = Trace.load(RECORDING)
    assert trace.meta.source.startswith("vllm ") and trace.config["num_blocks"] == 11
    assert sum(len(step.preempted) for step in trace) == 3 and not trace.check()
    assert len({name for step in trace for name in step.preempted}) == 2
    recorded_by_tests = ROOT / "tests/data/vllm-recorded/sync/d_preempt.jsonl.gz"
    assert RECORDING.read_bytes() == recorded_by_tests.read_bytes(), "copy it again after make record-vllm"


def test_the_commands_of_the_readme_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"`workbench ((?:simulate|trace) [^`]*examples/[^`]+)`", (EXAMPLES / "README.md").read_text())
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()) == 0
    assert "loses its KV blocks" in capsys.readouterr().out
