"""Two servers with different settings in one folder are told apart, and what cannot be done says what can."""

import msgspec
import pytest

from workbench import CostModel, simulate
from workbench.apps.cli import main
from workbench.trace.formats.kv_events.recording import collect


@pytest.fixture
def folder(tmp_path):
    requests = [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 9, "arrival_time": 0.1 * i} for i in range(30)]
    for rank, seats in enumerate((8, 1)):
        own = [each | {"id": f"{each['id']}-{rank}"} for each in requests]
        trace = simulate({"config": {"max_num_seqs": seats}, "requests": own}, cost_model=CostModel(fixed=0.05))
        trace.meta = msgspec.structs.replace(trace.meta, source="vllm 0.33.0", created=1.7e9)
        trace.save(tmp_path / f"vllm-20260101-120000-host-rank{rank}-7-0-00000.jsonl")
    return tmp_path


def test_servers_with_different_settings_are_not_pooled(folder, capsys):
    assert main(["trace", "explain", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.count("time to first token of 30 requests") == 2
    assert "rank 0 (the others have other settings):" in said and "rank 1 (the others" in said
    assert main(["trace", "info", str(folder)]) == 0
    assert "2 servers with different settings (rank 0; rank 1)" in capsys.readouterr().out


def test_a_folder_and_a_folder_that_is_not_there_say_what_to_do(folder, capsys):
    assert main(["trace", "html", str(folder)]) == 2
    assert "name a file in it, or serve all with workbench trace watch" in capsys.readouterr().err
    assert main(["trace", "watch", str(folder / "later")]) == 2
    assert "a recorder makes this folder when its server starts" in capsys.readouterr().err


def test_kv_events_that_never_came_say_why():
    said = repr(collect("tcp://127.0.0.1:5557", []))
    assert "nothing was received" in said and "tcp://*:5557" in said and "can answer" not in said
