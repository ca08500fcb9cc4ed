"""Access logs in the public formats, and a decision from one with costs from elsewhere."""

import json

import pytest
from test_tune import Machine, workload

from workbench import simulate
from workbench.apps.cli import main
from workbench.simulation.access_log import is_access_log, read_access_log

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:01.2224670,879,55
"""
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,Conversation log
"""
SERVEGEN = """\
request_id,timestamp,input_tokens,output_tokens
0,0.25,812,97
1,0.75,64,201
"""


def lengths(arrivals):
    return [(round(a.arrives_at, 4), len(a.prompt_token_ids), a.sampling.max_tokens) for a in arrivals]


def write(path, text):
    path.write_text(text)
    return path


def test_public_formats(tmp_path):
    azure = read_access_log(write(tmp_path / "azure.csv", AZURE))
    assert lengths(azure) == [(0.0, 374, 44), (4.3146, 396, 109), (14.5419, 879, 55)]
    burst = read_access_log(write(tmp_path / "burst.csv", BURST), speed=2)
    assert lengths(burst) == [(0.0, 472, 18), (20.0, 1087, 1)]
    assert lengths(read_access_log(write(tmp_path / "servegen.csv", SERVEGEN))) == [(0.0, 812, 97), (0.5, 64, 201)]
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3052, "input_length": 520, "output_length": 9, "hash_ids": [1, 3]},
    ]
    mooncake = read_access_log(write(tmp_path / "moon.jsonl", "\n".join(map(json.dumps, lines))))
    assert lengths(mooncake) == [(0.0, 600, 5), (3.052, 520, 9)]
    assert mooncake[0].prompt_token_ids[:512] == mooncake[1].prompt_token_ids[:512]
    own = [
        {"arrival": 7.5, "prompt_tokens": 10, "output_tokens": 3},
        {"arrival": 7, "prompt_tokens": 4, "output_tokens": 2},
    ]
    assert lengths(read_access_log(write(tmp_path / "own.jsonl", "\n".join(map(json.dumps, own))))) == [
        (0.0, 4, 2),
        (0.5, 10, 3),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "holds no request"),
        ("a.csv", "time,prompt_tokens\n1,2\n", "no column with the output tokens: name it one of output_tokens"),
        ("a.csv", "time,prompt_tokens,output_tokens\nsoon,2,3\n", "line 2: time must be seconds or a date, got 'soon'"),
        (
            "a.csv",
            "time,prompt_tokens,output_tokens\n1,0,3\n",
            "line 2: prompt_tokens must be a number of tokens from 1",
        ),
        ("a.csv", "time,prompt_tokens,output_tokens\n1,5\n", "line 2: output_tokens must be a number"),
        ("a.jsonl", "{", "line 1: not JSON"),
        ("a.jsonl", "[1]", "line 1: must be an object"),
    ],
)
def test_malformed_logs(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_access_log(write(tmp_path / name, text))


def test_a_decision_from_a_log_takes_its_costs_from_a_recording(tmp_path, capsys):
    work = workload()
    recording = tmp_path / "run.jsonl"
    simulate(work, cost_model=Machine()).save(recording)
    rows = [f"{r['arrival_time']},{r['prompt']['len']},{r['max_tokens']}" for r in work["requests"]]
    log = write(tmp_path / "access.csv", "\n".join(["arrival,prompt_tokens,output_tokens", *rows]))
    assert is_access_log(log) and not is_access_log(recording)
    assert main(["trace", "whatif", str(log), "--cost-from", str(recording), "--set", "max_num_seqs=32"]) == 0
    said = capsys.readouterr().out
    assert "60 requests of" in said and "--max-num-seqs 32" in said
    assert main(["trace", "tune", str(log), "--slo", "ttft_p99=1s"]) == 2
    assert "give --cost-from RECORDING" in capsys.readouterr().err


def test_a_column_that_is_missing_comes_before_those_that_nobody_knows(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,3,4\n")
    with pytest.raises(ValueError, match=r"no column with the arrival: .*arrival_time.*; it has arrived_at, num_pre"):
        read_access_log(path)
    every = ["arrived_at", "num_prefill_tokens", "num_decode_tokens"]
    with pytest.raises(ValueError, match=r"no column with the arrival: .*; no column is left$"):
        read_access_log(path, ignore_columns=every)
    path.write_text("delay,input_length,output_length\n0,3,4\n")
    with pytest.raises(ValueError, match="delay"):
        read_access_log(path)
