"""Names in files that others made are data: none of them is imported, called, started or opened."""

import copy
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from random_adapters import make_adapter
from tiny_configurations import COMMON
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from workbench import Engine, Trace, simulate
from workbench.analysis.hunt.target import find_target
from workbench.apps.cli import main
from workbench.apps.course.grade import exercises
from workbench.models import load_model
from workbench.models.adapter_files import read_adapter
from workbench.simulation.access_log import read_access_log
from workbench.trace.formats.otlp import to_otlp

SENTINEL = "named_in_a_file"
NAMES = (f"{SENTINEL}:run", SENTINEL, f"../{SENTINEL}.py", f"{SENTINEL}.py")
WATCHED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")

seen: list[str] = []
is_on = False


def hook(event, arguments):
    """Note processes, and files of the sentinel's name that are opened; a hook cannot be taken off again."""
    if is_on and (event in WATCHED or (event == "open" and str(arguments[0]).endswith(f"{SENTINEL}.py"))):
        seen.append(f"{event} {arguments}")


sys.addaudithook(hook)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Runs a reader, which may refuse what it reads, and tells what a name did."""
    home = tmp_path / "on the path"
    home.mkdir()
    for place in (home, tmp_path):
        (place / f"{SENTINEL}.py").write_text(f"import sys\nsys.{SENTINEL} = True\ndef run(*a, **k): return None\n")
    monkeypatch.syspath_prepend(home)
    monkeypatch.chdir(home)

    def run(reader):
        global is_on
        seen.clear()
        sys.modules.pop(SENTINEL, None)
        is_on = True
        try:
            reader()
        except (ValueError, TypeError, OSError):
            pass
        finally:
            is_on = False
            imported = [SENTINEL] if vars(sys).pop(SENTINEL, False) else []
        return [*seen, *imported]

    return run


def variants(value):
    """A JSON value with each text in it replaced by each name, and each name as a new field of each object."""
    places = []

    def walk(part, path):
        if isinstance(part, dict):
            places.extend([(*path, key) for key in ("module", "class", "model_file", "auto_map", "path")])
            for key, inner in part.items():
                walk(inner, (*path, key))
        elif isinstance(part, list):
            for index, inner in enumerate(part[:3]):
                walk(inner, (*path, index))
        elif isinstance(part, str):
            places.append(path)

    walk(value, ())
    for path in dict.fromkeys(places):
        for name in NAMES:
            changed = copy.deepcopy(value)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = name
            yield changed


def test_a_name_that_is_imported_or_started_is_noticed(watch):
    assert SENTINEL in watch(lambda: find_target(f"{SENTINEL}:run"))
    assert "subprocess.Popen" in watch(lambda: find_target("subprocess:Popen").make(["true"]))[0]
    assert "open" in watch(lambda: Path(f"{SENTINEL}.py").read_text())[0]


WORKLOAD = {
    "config": {"policy": "fcfs", "eviction": "lru", "speculative": {"method": "ngram"}, "num_speculative_tokens": 1},
    "requests": [{"id": "a", "prompt": {"len": 3, "seed": "s"}, "max_tokens": 2, "cache_salt": "x", "adapter": ""}],
}


def test_names_in_workloads_and_findings(watch, tmp_path, capsys):
    path = tmp_path / "w.json"
    for workload in variants(WORKLOAD):
        path.write_text(json.dumps(workload))
        assert not watch(lambda: simulate(path)), workload
    finding = {"scheduler": "workbench", "policy": "", "law": "progress", "folder": "x", "version": "1", "place": ""}
    for changed in variants({"finding": finding, "workload": WORKLOAD}):
        (tmp_path / "finding.json").write_text(json.dumps(changed["finding"]))
        (tmp_path / "workload.json").write_text(json.dumps(changed["workload"]))
        for against in ([], ["--against", "1.0"]) if changed["workload"] == WORKLOAD else ([],):
            if against and changed["finding"]["scheduler"] == "workbench":
                continue  # a known word, whose release would be fetched
            assert not watch(lambda more=against: main(["hunt", "replay", str(tmp_path), *more])), changed


def test_names_in_traces_and_logs(watch, tmp_path, capsys):
    trace = simulate(WORKLOAD | {"cost_model": {"fixed": 0.1}})
    path = tmp_path / "t.jsonl"
    trace.save(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {line["kind"]: index for index, line in reversed(list(enumerate(lines)))}
    for index in kinds.values():
        for changed in variants(lines[index]):
            written = [*lines[:index], changed, *lines[index + 1 :]]
            path.write_text("".join(json.dumps(line) + "\n" for line in written))
            assert not watch(lambda: Trace.load(path).whatif(max_num_seqs=1)), changed
            assert not watch(lambda: main(["trace", "info", str(path)])), changed
    to_otlp(trace, tmp_path / "spans.json")
    spans = json.loads((tmp_path / "spans.json").read_text())
    vcr = {"prompt_tokens": 3, "output_tokens": 1, "ttft_ms": 1.0, "arrival_ms": 0.0, "finish_reason": "stop"}
    log = {"timestamp": "0", "input_length": "3", "output_length": "1", "session": "x"}
    for name, content in (("spans.json", spans), ("vcr.jsonl", vcr), ("log.jsonl", log)):
        for changed in variants(content):
            (tmp_path / name).write_text(json.dumps(changed) + "\n")
            assert not watch(lambda name=name: read_access_log(tmp_path / name)), changed


def test_names_in_adapters_and_remembered_checks(watch, tmp_path, monkeypatch):
    folder = make_adapter(tmp_path / "adapter", {"model.layers.0.a": (8, 8)}, seed=0, form="PEFT")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "x"}
    for changed in variants(config):
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        assert not watch(lambda: read_adapter("a", folder)), changed
    from workbench.models.preflight_once import from_json

    for kind, content in (("dtype", "load"), ("dtype", SENTINEL), (SENTINEL, []), ("run", ["x"])):
        with pytest.raises((ValueError, KeyError)):
            from_json({"backend": {kind: content}})


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_names_in_model_folders(watch, tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny_model("llama").parameters())))
    (folder / "config.json").write_text(json.dumps({**COMMON, "model_type": "llama"}))
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert not watch(lambda: Engine(load_model(folder), num_blocks=8).close())
    index = {"metadata": {"x": "y"}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else index
    if file == "tokenizer_config.json":
        content |= {"tool_parser_type": "x", "chat_template_type": "x"}

    def read():
        model = load_model(folder)
        if file != "model.safetensors.index.json":  # whose names an engine does not know
            Engine(model, num_blocks=8)

    for changed in variants(content):
        path.write_text(json.dumps(changed))
        for place in (folder, folder.parent):
            (place / f"{SENTINEL}.py").write_text(f"import sys\nsys.{SENTINEL} = True\n")
        assert not watch(read), changed


def test_names_in_notebooks(watch, tmp_path):
    cells = [{"cell_type": "code", "metadata": {"nbgrader": {"grade_id": "x", "solution": True}}, "source": ["1"]}]
    for changed in variants({"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}}):
        (tmp_path / "n.ipynb").write_text(json.dumps(changed))
        assert not watch(lambda: exercises(tmp_path)), changed
