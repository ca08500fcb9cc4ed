"""``workbench trace``: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from trace_helpers import one_trace

from workbench import simulate
from workbench.apps.cli import main


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.jsonl.gz"
    one_trace().save(path)
    return path


def test_info(saved, capsys):
    assert main(["trace", "info", str(saved)]) == 0
    printed = capsys.readouterr().out
    hits = printed.index("hit rate of prompt tokens: ")
    first, second, tokens, throughput, use, *latencies = [line for line in printed[:hits].splitlines() if line]
    assert first == "engine: 25 steps, 5 requests, 60 tokens scheduled, done"
    assert second == "5 of 5 requests ended in 25 steps, 6.000 s"
    assert tokens.endswith(
        "35 sampled, 64 found in the prefix cache (after preemptions too), 3 recomputed (1 preemption)"
    )
    assert throughput == "throughput: 5.833 output and 10 scheduled tokens per second"
    assert use == "use: token budget 44.1%, KV blocks 56.9% (peak 100.0%)"
    assert latencies[0].split() == ["latency", "mean", "p50", "p95", "p99", "max", "count"]
    rows = [re.split(r"  +(?=\d)", line) for line in latencies[1:]]
    assert [row[0] for row in rows] == [
        "time to first token", "  until scheduled", "  in prefill", "inter-token latency", "end to end"
    ]  # fmt: skip
    assert rows[0][1:] == ["683 ms", "376 ms", "1.51 s", "1.67 s", "1.71 s", "5"]
    assert "by depth in the prompt: 0-255: " in printed[hits:]


def test_perfetto(saved, capsys):
    assert main(["trace", "perfetto", str(saved)]) == 0
    out = saved.with_name("run.perfetto.json")
    assert str(out) in capsys.readouterr().out
    assert json.loads(out.read_bytes())["traceEvents"]
    assert main(["trace", "perfetto", str(saved), str(saved.with_name("other.json"))]) == 0
    assert saved.with_name("other.json").read_bytes() == out.read_bytes()


def test_html(saved, capsys):
    assert main(["trace", "html", str(saved)]) == 0
    page = saved.with_name("run.html")
    assert str(page) in capsys.readouterr().out
    assert "<html" in page.read_text(encoding="utf-8")[:200].lower()


def test_diff(tmp_path, capsys):
    workload = {"requests": [{"id": "a", "prompt": {"len": 50}, "max_tokens": 2}]}
    simulate(workload).save(tmp_path / "a.jsonl")
    simulate(workload, config={"max_num_batched_tokens": 20}).save(tmp_path / "b.jsonl")
    assert main(["trace", "diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "same tokens" in printed
    assert "first divergence: step 0, a: A computes tokens [0, 50), B computes tokens [0, 20)" in printed


@pytest.mark.parametrize(
    "command", [["info"], ["narrate"], ["diff"], ["explain", "--slowest", "4"], ["explain"]], ids=" ".join
)
def test_names_cannot_steer_the_terminal(tmp_path, capsys, command):
    """Names in a file may hold escape sequences, line breaks and marks that reverse the text."""
    evil = "\x1b]0;title\x07\x1b[2J\nFORGED\u202e"
    requests = [{"id": f"{evil}{i}", "prompt": {"len": 20 + i}, "max_tokens": 9} for i in range(4)]
    trace = simulate({"config": {"num_blocks": 12, "block_size": 4, "max_num_seqs": 2}, "requests": requests})
    path = tmp_path / "t.jsonl"
    trace.save(path)
    meta, _, rest = path.read_text().partition("\n")
    meta = json.dumps({**json.loads(meta), "source": evil, "model": {"name": evil}})
    path.write_text(f"{meta}\n{rest}")
    name, *options = command
    more = [str(path)] if name == "diff" else [] if options or name != "explain" else [f"{evil}3"]
    assert main(["trace", name, str(path), *more, *options]) == 0
    printed = capsys.readouterr().out
    assert "FORGED" in printed or name == "narrate"
    for line in printed.splitlines():
        assert line.isprintable() and not line.startswith("FORGED"), repr(line)


@pytest.mark.parametrize("command", ["info", "html", "perfetto"])
@pytest.mark.parametrize("content", [None, b"", b"not a trace\n", b'{"kind":"meta","schema_version":7}\n'])
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, command, content):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", command, str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(path) in printed.err
    assert printed.err.count("\n") == 1
    assert [found.name for found in tmp_path.iterdir()] == ([] if content is None else ["t.jsonl"])


@pytest.mark.parametrize("port", [-1, 0, 99999])
def test_a_port_that_cannot_be_is_one_line_and_status_2(saved, capsys, port):
    assert main(["trace", "watch", str(saved), "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert message == f"workbench trace watch: --port must be from 1 to 65535, got {port}\n"


def test_traces_of_different_workloads(saved, tmp_path, capsys):
    simulate({"requests": [{"id": "other", "prompt": [1], "max_tokens": 1}]}).save(tmp_path / "b.jsonl")
    assert main(["trace", "diff", str(saved), str(tmp_path / "b.jsonl")]) == 2
    assert "different requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ([], "info narrate explain why diff perfetto html"),
        (["info"], "trace --from --to"),
        (["html"], "trace out --from --to"),
        (["perfetto"], "trace out"),
        (["diff"], "a b"),
    ],
    ids=lambda value: value[0] if value and isinstance(value, list) else None,
)
def test_help(capsys, command, named):
    with pytest.raises(SystemExit) as stop:
        main(["trace", *command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(" ".join(["usage: workbench trace", *command]))
    assert set(named.split()) <= set(re.findall(r"[\w-]+", shown))


@pytest.mark.parametrize("window", [["--from", "60s", "--to", "80s"], ["--last", "4s"]])
def test_the_slow_steps_of_a_part_are_in_it(window, capsys):
    recording = Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz"
    assert main(["trace", "info", str(recording), *window]) == 0
    said = capsys.readouterr().out
    first, last = map(int, re.search(r"steps (\d+) to (\d+), ", said).groups())
    named = [int(number) for number in re.findall(r"^(?:slow|stall): step (\d+) took", said, re.MULTILINE)]
    assert named and all(first <= step <= last for step in named)
    lost = re.search(r"slow: (\d+) steps? lost", said)
    assert lost is None or int(lost[1]) <= last - first + 1
