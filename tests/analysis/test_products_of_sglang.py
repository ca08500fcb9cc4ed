"""The answers about a recording of SGLang: its own options, its incident, and whose rules a simulation follows."""

from pathlib import Path

import msgspec
import pytest

from workbench import simulate
from workbench.analysis.flags import Server
from workbench.analysis.misses import misses_table
from workbench.apps.cli import main
from workbench.trace import Trace
from workbench.viz.export_html import _answers
from workbench.viz.layout.packet import trace_facts

RECORDING = Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """The same run, with vLLM and with SGLang as its source."""
    made = {}
    for source in ("vllm 0.33.0", "sglang 0.5.23"):
        trace = Trace.load(RECORDING)
        trace.meta = msgspec.structs.replace(trace.meta, source=source)
        made[source.partition(" ")[0]] = path = tmp_path_factory.mktemp("run") / "run.jsonl.gz"
        trace.save(path)
    return made


@pytest.mark.parametrize(
    "changes, flags",
    [
        ({"num_blocks": 81}, "--max-total-tokens 320"),
        ({"num_blocks": 81, "block_size": 8}, "--page-size 8 --max-total-tokens 640"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 3}, "--chunked-prefill-size 64 --max-running-requests 3"),
        ({"enable_prefix_caching": False, "async_scheduling": True}, "--disable-radix-cache"),
        ({"async_scheduling": False}, "--disable-overlap-schedule"),
        ({"enable_chunked_prefill": False}, "--chunked-prefill-size -1"),
        ({"watermark": 0.1}, ""),
        ({}, ""),
    ],
)
def test_changes_are_options_of_the_recorded_server(changes, flags):
    server = Server(is_sglang=True, config={"block_size": 4})
    assert server.flags(changes) == flags
    assert server.command(changes) == (f"python -m sglang.launch_server --model-path MODEL {flags}" if flags else "")
    assert "sglang" not in Server(config={"block_size": 4}).command({"num_blocks": 81})


def test_predictions_name_the_command_and_whose_rules_they_follow(recordings, capsys):
    for name, path in recordings.items():
        assert main(["trace", "whatif", str(path), "--set", "max_num_seqs=2", "--force"]) == 0
        told = capsys.readouterr().out
        assert ("--max-running-requests 2" in told) == (name == "sglang")
        assert ("vllm serve" in told) == (name == "vllm")
        assert ("vLLM's rules are applied to its requests" in told) == (name == "sglang")
        options = ["--slo", "e2e_p99=1ms", "--sweep", "max_num_seqs=1,2", "--force"]
        assert main(["trace", "tune", str(path), *options]) in (0, 1)
        told = capsys.readouterr().out
        assert ("vLLM's rules are applied to its requests" in told) == (name == "sglang")
        assert "vllm serve" not in told or name == "vllm"


def test_a_recording_of_sglang_has_an_incident(recordings):
    answers = [_answers(Trace.load(path)) for path in recordings.values()]
    assert answers[0]["incident"] == answers[1]["incident"] and answers[0]["incident"]["slow"]
    assert all(trace_facts(Trace.load(path))["incident"] is True for path in recordings.values())


def test_why_names_its_options_and_whose_rules_it_applies(tmp_path):
    config = {"num_blocks": 6, "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    requests = [{"id": "big", "prompt": {"len": 40}}, {"id": "small", "prompt": {"len": 3}, "max_tokens": 1}]
    stuck = simulate({"config": config, "requests": requests}, as_vllm=True)
    stuck.meta = msgspec.structs.replace(stuck.meta, source="sglang 0.5.23")
    told = repr(stuck.why())
    assert "--max-total-tokens" in told and "gpu-blocks" not in told and "the next decisions of SGLang" in told


@pytest.mark.parametrize("source, rules", [("sglang 0.5.23", " by vLLM's rules, not SGLang's"), ("simulation", "")])
def test_misses_say_whose_rules_they_are_simulated_by(source, rules):
    requests = [{"id": f"r{i}", "prompt": {"len": 20, "seed": "A"}, "arrival_step": 9 * i} for i in range(3)]
    trace = simulate({"config": {"num_blocks": 12, "block_size": 4}, "requests": requests})
    trace.meta = msgspec.structs.replace(trace.meta, source=source)
    assert f"change, simulated with the same requests{rules}\n" in str(misses_table(trace))
