"""A misspelt choice gets the word that was probably meant, wherever it is given."""

import json

import pytest

from workbench import EngineConfig, simulate, simulate_fleet
from workbench.analysis.fleet.routers import make_router
from workbench.analysis.sweep import read_settings
from workbench.analysis.tuning import read_slo
from workbench.apps.cli import main
from workbench.apps.playground.session import Session
from workbench.base.device import check_device
from workbench.base.field_checks import choice, suggestion
from workbench.kernels.attention.selection import resolve_backend_name
from workbench.scheduler.eviction import make_eviction
from workbench.viz import watch
from workbench.viz.panel_names import panel_id

WORKLOAD = {
    "requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 1, "arrival_time": 0.0}],
    "cost_model": {"fixed": 0.01},
}

DOORS = {
    "a choice of a configuration": (lambda: EngineConfig(policy="prority"), "priority"),
    "a choice": (lambda: choice("colour", "blu", ["blue", "red"]), "blue"),
    "a router": (lambda: simulate_fleet(WORKLOAD, replicas=2, router="cache_awre"), "cache_aware"),
    "a router by itself": (lambda: make_router("stiky"), "sticky"),
    "a policy of eviction": (lambda: make_eviction("belay"), "belady"),
    "a backend": (lambda: resolve_backend_name("gathr"), "gather"),
    "a device": (lambda: check_device("device", "gpuu"), "gpu"),
    "a panel": (lambda: panel_id("block_table"), "block_tables"),
    "a theme": (lambda: watch(simulate(WORKLOAD), theme="drak"), "dark"),
    "a view": (lambda: watch(simulate(WORKLOAD), view="kernle"), "kernel"),
    "a target": (lambda: read_slo("ttft_p9=1s"), "ttft_p99"),
    "a setting": (lambda: read_settings(["max_num_seq=3"]), "max_num_seqs"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_misspelt_choice_gets_a_suggestion(door):
    call, meant = DOORS[door]
    with pytest.raises(ValueError, match=rf"did you mean {meant}\?"):
        call()


@pytest.mark.parametrize("command", ["run --router", "size --slo ttft_p99=2s --router", "compare --routers"])
def test_fleet_commands_suggest_a_router(tmp_path, capsys, command):
    (tmp_path / "w.json").write_text(json.dumps(WORKLOAD))
    name, *options = command.split()
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["fleet", name, str(tmp_path / "w.json"), *options, "round_robbin"]))
    assert ended.value.code
    assert "router must be one of round_robin, " in (said := capsys.readouterr().err)
    assert "got 'round_robbin' (did you mean round_robin?)" in said


def test_the_playground_suggests_a_router():
    asked = {"command": "run", "workload": json.dumps(WORKLOAD), "replicas": 2, "router": "stickey"}
    answer = Session().handle(json.dumps(asked), None)
    assert json.loads(answer.facts)["error"].endswith("got 'stickey' (did you mean sticky?)")


def test_nothing_is_suggested_for_what_is_like_nothing():
    for value in ("fastest", "", "x" * 10**6, None, 7, 10**5000, ["blue"], b"blue"):
        assert suggestion(value, ["blue", "red"]) == ""
