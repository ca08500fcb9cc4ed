"""Logs of servers: what people paste into issues is read, judged, and said to be what it is."""

import gzip
import json

import pytest

from workbench.apps.cli import main
from workbench.trace.formats.server_log import is_server_log, read_server_log


def vllm(second, running, waiting, use="12.0%", prompt=0.0, output=0.0, hits="0.0%", engine="000"):
    return (
        f"(APIServer pid=7) INFO 05-19 10:13:{second:02} [loggers.py:271] Engine {engine}: Avg prompt throughput: "
        f"{prompt} tokens/s, Avg generation throughput: {output} tokens/s, Running: {running} reqs, Waiting: {waiting} "
        f"reqs, GPU KV cache usage: {use}, Prefix cache hit rate: {hits}"
    )


def sglang(second, running, queue, use=0.29, rate=144.95, mark=",", rank=" TP0"):
    return (
        f"[2026-04-08 14:05:{second:02}{rank}] Decode batch{mark} #running-req: {running}, #token: 20800, token usage: "
        f"{use}, cuda graph: True, gen throughput (token/s): {rate}, #queue-req: {queue}"
    )


SGLANG_PREFILL = (
    "[2026-04-08 14:05:25 TP0] Prefill batch, #new-seq: 1, #new-token: 100, #cached-token: 300, token usage: 0.08, "
    "#running-req: 31, #queue-req: 2, cuda graph: True, input throughput (token/s): 559.53"
)
LLAMA = [
    "srv  update_slots: all slots are idle",
    "slot launch_slot_: id  0 | task 3 | processing task, is_child = 0",
    "slot launch_slot_: id  1 | task 4 | processing task, is_child = 0",
    "srv  process_single_task: no slot is available, defer task, id_task = 9",
]
OLD_LLAMA = [
    'INFO [   launch_slot_with_task] slot is processing task | tid="0x1" timestamp=1720645907 id_slot=0 id_task=1',
    'INFO [   launch_slot_with_task] slot is processing task | tid="0x1" timestamp=1720645907 id_slot=1 id_task=2',
    'INFO [                 release] slot released | tid="0x1" timestamp=1720645909 id_slot=0 id_task=1 n_past=9',
]
OLD_VLLM = (
    "INFO 05-25 06:50:29 [metrics.py:486] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 15.5 "
    "tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 0.0%, CPU KV cache usage: 0.1%."
)
RELEASED = [
    "slot      release: id  0 | task 3 | stop processing: n_tokens = 90, truncated = 0",
    "slot launch_slot_: id  0 | task 9 | processing task",
]
NOISE = ["INFO 05-19 10:12:59 [api_server.py:1091] Starting", "Loading shards:  33% Completed", ""]

CASES = {
    "still": ([vllm(1, 0, 6), vllm(11, 0, 6)],
              ["0 running, 6 waiting", "nothing runs, and the head", "2 lines over 10 s"]),
    "a space before the sign": (["Running: 6 reqs, Waiting: 6 reqs, GPU KV cache usage: 12" + " %"],
                                ["6 running, 6 waiting, KV cache use 12%", "most likely for a seat (--max-num-seqs)"]),
    "idle": ([vllm(1, 3, 2), vllm(11, 0, 0)], ["no request is unfinished"]),
    "served": ([vllm(1, 3, 0, output=81.5)], ["requests are served, and none waits"]),
    "full": ([vllm(1, 18, 43, "95.9%", output=1055.3)], ["most likely for room in the KV cache"]),
    "perhaps full": ([vllm(1, 18, 43, "57.2%", output=1055.3)], ["if a prompt needs more than the free 43%, for room"]),
    "starved": ([vllm(1, 2, 0)], ["requests run and get no token"]),
    "not numbers": ([vllm(1, 2, 1, "nan%", output=5.0, hits="nan%")],
                    ["KV cache use unknown, hits in the prefix cache unknown"]),
    "two engines": ([vllm(1, 2, 0, output=5.0), vllm(1, 0, 4, engine="001")],
                    ["000: requests are served", "001: nothing runs, and the head"]),
    "an older vLLM": ([OLD_VLLM], ["1 running, 3 waiting"]),
    "an error": ([vllm(1, 0, 4), "ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore died"],
                 ["an error in the log: ERROR vllm.v1.engine.exceptions.EngineDeadError"]),
    "SGLang": ([sglang(1, 5, 12)],
               ["5 running, 12 waiting, KV cache use 29%", "--max-running-requests", "workbench simulate"]),
    "an older SGLang": ([sglang(1, 5, 0, mark=".", rank="")], ["5 running, 0 waiting", "none waits"]),
    "SGLang, full": ([sglang(1, 5, 12, 0.99), "KV cache pool is full. Retract requests. #retracted_reqs: 1"],
                     ["--mem-fraction-static", "1 line about preempted requests"]),
    "SGLang, prefill": ([SGLANG_PREFILL], ["31 running, 2 waiting, KV cache use 8%, hits in the prefix cache 75%"]),
    "llama-server": (LLAMA, ["2 running, 1 waiting, KV cache use unknown", "--parallel", "/slots"]),
    "llama-server, released": ([*LLAMA, *RELEASED], ["2 running, 0 waiting"]),
    "llama-server, idle": ([*LLAMA[:2], LLAMA[0]], ["no request is unfinished"]),
    "an older llama-server": (OLD_LLAMA, ["1 running, 0 waiting"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_why_reads_the_lines_of_a_log(tmp_path, capsys, name):
    lines, words = CASES[name]
    path = tmp_path / "server.log"
    path.write_text("\n".join([*NOISE, *lines, *NOISE]))
    assert main(["why", str(path)]) == 0
    said = capsys.readouterr().out
    for each in words:
        assert each in said
    assert "nan" not in said
    if "no request is unfinished" not in said:
        assert "cannot tell from a log: which request waits" in said and "workbench why " in said


@pytest.mark.parametrize("name", CASES)
def test_trace_info_sums_a_log_up(tmp_path, capsys, name):
    path = tmp_path / "server.txt"
    path.write_text("\n".join(CASES[name][0]))
    assert main(["trace", "info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "about its load" in said and "cannot answer: which request was slow" in said and "nan" not in said


def test_the_figures_of_a_log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("\n".join([vllm(1, 0, 6), vllm(11, 2, 4, "36.0%", 100.0, 20.5, "50.0%"), vllm(31, 4, 2, "nan%")]))
    assert repr(read_server_log(path)).splitlines()[:6] == [
        "server.log: 3 lines of vLLM about its load over 30 s",
        "running requests: 2 on average, at most 4, at the end 4",
        "waiting requests: 4 on average, at most 6, at the end 2",
        "use of the KV cache: 24% on average, at most 36%, at the end 36%",
        "tokens per second: 40.17 on average, at most 120.5, at the end 0",
        "hits in the prefix cache: 17% on average, at most 50%, at the end 0%",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_logs_are_read_whatever_their_form(tmp_path, capsys, encoding, pack):
    path = tmp_path / "pasted.jsonl"
    path.write_bytes(pack(vllm(1, 0, 6).encode(encoding)))
    assert main(["why", str(path)]) == 0 and "0 running, 6 waiting" in capsys.readouterr().out
    path.write_bytes(pack((json.dumps({"log": vllm(1, 0, 6) + "\n", "stream": "stdout"}) + "\n").encode(encoding)))
    assert main(["why", str(path)]) == 0 and "0 running, 6 waiting" in capsys.readouterr().out
    assert main(["trace", "info", str(path)]) == 0 and "1 line of vLLM" in capsys.readouterr().out


def test_other_files_are_no_logs(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text("\n".join(NOISE))
    assert not is_server_log(path) and main(["why", str(path)]) == 2
    path.write_text(f"{vllm(1, 0, 6)}\n{sglang(1, 2, 3)}\n")
    capsys.readouterr()
    assert main(["why", str(path)]) == 2 and "lines of vLLM and of SGLang" in capsys.readouterr().err
    path.write_text(vllm(1, 0, 6))
    for command in (["why"], ["trace", "info"]):
        assert main([*command, str(path), "--last", "5s"]) == 2
        assert "take a part of a trace" in capsys.readouterr().err


GAUGES = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]


@pytest.mark.parametrize("wrong", ["NaN", "+Inf"])
@pytest.mark.parametrize("gauge", GAUGES)
def test_gauges_that_are_not_numbers_are_unknown(tmp_path, capsys, gauge, wrong):
    path = tmp_path / "m.prom"
    samples = [f'{name}{{engine="0"}} {wrong if name == gauge else 1}' for name in GAUGES]
    text = "\n".join([*samples, 'vllm:generation_tokens_total{engine="0"} 5'])
    path.write_text("".join(f"# scraped {at}\n{text}\n" for at in (10, 15)))
    for command in (["trace", "info"], ["why"]):
        assert main([*command, str(path)]) == 0
        said = capsys.readouterr().out
        assert "nan" not in said.lower() and "inf%" not in said and "unknown" in said, said


def test_a_counter_that_is_not_a_number_gives_no_rate(tmp_path, capsys):
    path = tmp_path / "m.prom"
    samples = ['vllm:generation_tokens_total{engine="0"} NaN', 'vllm:num_requests_running{engine="0"} 1']
    path.write_text("".join(f"# scraped {at}\n{chr(10).join(samples)}\n" for at in (10, 15)))
    for command in (["trace", "info"], ["why"]):
        assert main([*command, str(path)]) == 0 and "nan" not in capsys.readouterr().out.lower()
