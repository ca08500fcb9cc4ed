"""Traces made by the package in Pyodide are byte for byte those made here, on vLLM's workloads and on random ones."""

import hashlib
import json
import random
import re

import feature_workloads
import vllm_features
import vllm_traces
from pyodide_node import run_in_pyodide
from tiers import examples

from workbench import simulate
from workbench.apps.playground.presets import PRESETS
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import encode_packet

PROGRAM = """
import hashlib, json, pathlib, sys
from workbench import simulate
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import encode_packet

def made(workload, as_vllm):
    trace = simulate(workload, as_vllm=as_vllm, max_steps=4000)
    trace.save("trace.jsonl")
    return pathlib.Path("trace.jsonl").read_bytes(), encode_packet(columns_of(trace))

def digests(workload, as_vllm):
    return [hashlib.sha256(content).hexdigest() for content in made(workload, as_vllm)]

assert not {name.partition(".")[0] for name in sys.modules} & {"numpy", "tqdm", "mlx"}
json.dumps({"digests": [digests(*each) for each in json.loads(given)], "python": sys.version_info[:2]})
"""


def made_here(workload, folder, as_vllm=False):
    trace = simulate(workload, as_vllm=as_vllm, max_steps=4000)
    trace.save(folder / "trace.jsonl")
    return [
        hashlib.sha256(content).hexdigest()
        for content in ((folder / "trace.jsonl").read_bytes(), encode_packet(columns_of(trace)))
    ]


def vllm_workloads():
    plain = [json.loads((vllm_traces.DATA / "workloads" / f"{name}.json").read_text()) for name in vllm_traces.NAMES]
    workloads = plain + [vllm_features.read(name)["workload"] for name in vllm_features.NAMES]
    return [{key: workload[key] for key in ("config", "requests")} for workload in workloads]


def random_workloads(count):
    rng = random.Random(19)
    kinds = feature_workloads.KINDS
    return [feature_workloads.random_workload(kinds[i % len(kinds)], rng) for i in range(count)]


def test_traces_and_packets_are_the_same_bytes_in_pyodide(tmp_path):
    # Some of vLLM's runs wait forever, as they did there.
    workloads = [(workload, True) for workload in vllm_workloads()]
    workloads += [(workload, False) for workload in random_workloads(examples(200))]
    found = run_in_pyodide(PROGRAM, workloads, tmp_path)
    assert found["python"] >= [3, 14]
    expected = [made_here(workload, tmp_path, as_vllm) for workload, as_vllm in workloads]
    differ = [i for i, (here, there) in enumerate(zip(expected, found["digests"], strict=True)) if here != there]
    assert not differ, f"{len(differ)} of {len(workloads)} workloads differ, the first is number {differ[0]}"


FLEETS = """
import hashlib, json
from workbench.apps.playground.session import Session
from workbench.viz.duel import MEASURES

def duels(workload, pinned, routers):
    session, told = Session(), []

    def run(router):
        command = {"command": "run", "workload": json.dumps(workload), "replicas": 4, "router": router}
        answer = session.handle(json.dumps(command))
        return hashlib.sha256(answer.packet).hexdigest(), json.loads(answer.facts)["fleet"]

    runs = [run(pinned)]
    session.handle('{"command": "pin"}')
    for router in routers:
        runs.append(run(router))
        for name in MEASURES:
            settled = json.loads(session.handle(json.dumps({"command": "settle", "measure": name})).facts)
            told.append((settled["winner"], settled["told"]))
    return runs, told

json.dumps(duels(*json.loads(given)))
"""


def test_duels_of_routers_end_alike_in_pyodide(tmp_path):
    asked = PRESETS["fleet"].workload, "round_robin", ["sticky", "prefix", "cache_aware"]
    names = {"given": json.dumps(asked)}
    *lines, _ = FLEETS.strip().splitlines()
    exec("\n".join(lines), names)
    found = run_in_pyodide(FLEETS, asked, tmp_path)
    assert found == json.loads(json.dumps(names["duels"](*asked)))
    runs, told = found
    assert len(runs) == 4 and {winner for winner, _ in told} == {"A", "B", "neither"}


def test_the_comparison_sees_a_different_trace(tmp_path):
    """The control: one more token in a prompt, another digest."""
    (workload,) = random_workloads(1)
    other = json.loads(re.sub(r'"len": (\d+)', lambda m: f'"len": {int(m[1]) + 1}', json.dumps(workload), count=1))
    assert made_here(workload, tmp_path) == made_here(workload, tmp_path) != made_here(other, tmp_path)
