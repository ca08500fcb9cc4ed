"""Small files that ask for a lot of memory, pipes and devices: every reader refuses them before it builds anything."""

import json
import os
import sys
import threading
import tracemalloc

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from random_adapters import make_adapter
from tiny_configurations import COMMON
from tiny_models import tiny_loaded_model, tiny_model

from workbench import Engine, Trace, simulate
from workbench.analysis.fleet.sizing import _Known
from workbench.apps.bench.datasets import sharegpt_requests
from workbench.apps.cli import main
from workbench.base.outside_files import json_value, open_bytes
from workbench.models import load_model
from workbench.models.adapter_files import read_adapter
from workbench.models.gguf.file import GGUFFile
from workbench.models.weight_headers import check_filled
from workbench.simulation.access_log import is_access_log, read_access_log
from workbench.simulation.arrivals import read_mooncake, read_sharegpt
from workbench.simulation.request_log import read_request_log
from workbench.simulation.workload import read_workload
from workbench.trace.follower import TraceFollower
from workbench.trace.formats.kv_events.recording import is_kv_events, read_kv_events
from workbench.trace.formats.otlp import is_otlp, read_spans
from workbench.trace.formats.scrapes import is_scrapes, read_scrapes
from workbench.trace.formats.vcr import read_vcr

DEEP = "[" * 200_000


@pytest.fixture
def peak():
    """Bytes that Python has allocated at most since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


CSV = "arrival,prompt_tokens,output_tokens\n" + "0,10000000,1\n" * 60
VCR = json.dumps({"prompt_tokens": 10**7, "output_tokens": 1, "ttft_ms": 1.0, "arrival_ms": 0.0}) + "\n"
SPAN = {
    "name": "llm_request",
    "startTimeUnixNano": "1",
    "endTimeUnixNano": "2",
    "attributes": [
        {"key": f"gen_ai.usage.{name}_tokens", "value": {"intValue": count}}
        for name, count in (("prompt", "10000000"), ("completion", "1"))
    ],
}
OTLP = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN] * 60}]}]})
MOONCAKE = json.dumps({"timestamp": 0, "input_length": 10**7, "output_length": 1, "hash_ids": [1]}) + "\n"
PLAIN = json.dumps({"timestamp": 0, "input_length": 10**7, "output_length": 1}) + "\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log.csv", CSV),
        ("vcr.jsonl", VCR * 60),
        ("vcr.jsonl", VCR.replace("}", ', "block_hashes": [1, 2]}') * 60),
        ("spans.json", OTLP),
        ("mooncake.jsonl", MOONCAKE * 60),
        ("plain.jsonl", PLAIN * 60),
    ],
)
def test_a_log_whose_prompts_fill_the_memory_is_refused_before_they_are_made(tmp_path, peak, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match="600000000 tokens, allowed are 33554432"):
        read_access_log(path)
    assert peak() < 2**24


def test_a_workload_is_counted_too(peak):
    with pytest.raises(ValueError, match="600000000 tokens, allowed are 33554432"):
        read_workload({"requests": [{"id": f"{i}", "prompt": {"len": 10**7}} for i in range(60)]})
    assert peak() < 2**24


@pytest.mark.parametrize("read", [read_access_log, lambda path: list(read_mooncake(path))])
def test_blocks_of_a_prompt_are_cut_before_it_is_made(tmp_path, peak, read):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [7] * 60_000}))
    with pytest.raises(ValueError, match=r"line 1: .*60000 hash_ids"):
        read(path)
    assert peak() < 2**24
    (tmp_path / "vcr.jsonl").write_text(
        json.dumps({"meta": {"block_size": 2**20}})
        + "\n"
        + VCR.replace("10000000", "3").replace("}", ', "block_hashes": [5, 6, 7, 8]}')
    )
    (arrival,) = read_access_log(tmp_path / "vcr.jsonl")
    assert len(arrival.prompt_token_ids) == 3 and peak() < 2**24


def test_a_recording_without_token_ids_is_counted_before_a_fork_makes_them_up(tmp_path, peak):
    requests = [{"id": f"r{i}", "prompt": {"len": 9}, "max_tokens": 2} for i in range(60)]
    path = tmp_path / "t.jsonl"
    simulate({"requests": requests}).save(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "request":
            del line["prompt_token_ids"]
            line["num_prompt_tokens"] = 2**24
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="1006632960 tokens, allowed are 33554432"):
        Trace.load(path).fork(max_num_seqs=3)
    assert peak() < 2**25


# -- folders of models and adapters ---------------------------------------------------------------------------------


def model_folder(folder, **changes):
    """A folder with the weights of a tiny llama."""
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny_model("llama").parameters())))
    (folder / "config.json").write_text(json.dumps({**COMMON, "model_type": "llama", **changes}))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 30_000),
        ("num_hidden_layers", 2**31),
        ("num_hidden_layers", 1e300),
        ("n_layers", 30_000),
        ("num_layers", 30_000),
        ("hidden_size", 2**31),
        ("intermediate_size", 2**40),
        ("vocab_size", 2**31),
        ("text_config", {"num_hidden_layers": 30_000}),
    ],
)
def test_sizes_of_a_configuration_are_compared_with_the_weights(tmp_path, peak, field, value, monkeypatch):
    monkeypatch.setattr("mlx_lm.utils.load_model", lambda *a, **k: pytest.fail("the model is built"))
    name = "num_hidden_layers" if field == "text_config" else field
    with pytest.raises(ValueError, match=rf"config\.json: {name} is .* they are not of one model"):
        load_model(model_folder(tmp_path / "m", **{field: value}))
    assert peak() < 2**25


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_deep_nesting_in_a_model_folder_is_a_value_error(tmp_path, file):
    """The command line prints those as one line."""
    folder = model_folder(tmp_path / "m")
    (folder / file).write_text('{"rope_scaling": ' + DEEP)
    with pytest.raises(ValueError, match=rf"{file} is not JSON: it is nested too deeply"):
        load_model(folder)


def sparse(path, size):
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(size)
    return path


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="holes cannot be found here")
def test_a_file_that_is_nearly_all_hole_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    sparse(path, 8 + len(header) + 2**30)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("the file system keeps no holes")
    with pytest.raises(ValueError, match="the rest is holes"):
        check_filled(path)
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "model_type": "llama"}))
    with pytest.raises(ValueError, match="the rest is holes"):
        load_model(tmp_path)
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="the rest is holes"):
        GGUFFile(sparse(gguf, 2**30))
    whole = tmp_path / "whole"
    whole.write_bytes(os.urandom(2**20) * 20)
    check_filled(whole)
    sparse(whole, 2**24 + 2**23)
    check_filled(whole)


@pytest.mark.parametrize("form", ["mlx-lm", "PEFT"])
def test_the_rank_of_an_adapter_is_checked_before_its_matrices_are_read(tmp_path, form, monkeypatch):
    loaded = tiny_loaded_model("llama")
    sizes = {"model.layers.0.self_attn.q_proj": loaded.model.layers[0].self_attn.q_proj.weight.shape[::-1]}
    wide = make_adapter(tmp_path / "wide", sizes, seed=0, rank=300, form=form)
    other = make_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj": (8, 8)}, seed=0, form=form)
    unknown = make_adapter(tmp_path / "unknown", {"model.layers.7.x": (8, 8)}, seed=0, form=form)
    with Engine(loaded, num_blocks=8, max_loras=1) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("workbench.models.adapter_files.mx.load", lambda *a: pytest.fail("the matrices are read"))
            for folder, words in ((wide, "rank 300"), (other, "another model"), (unknown, "not a linear layer")):
                with pytest.raises(ValueError, match=words):
                    engine.add_adapter("a", folder)
        engine.add_adapter("a", make_adapter(tmp_path / "right", sizes, seed=0, form=form))


# -- files that are not regular, and deep nesting, in every reader ----------------------------------------------------

READERS = {
    "trace": ("t.jsonl", Trace.load),
    "gzipped trace": ("t.jsonl.gz", Trace.load),
    "followed trace": ("t.jsonl", TraceFollower),
    "workload": ("w.json", read_workload),
    "csv": ("a.csv", read_access_log),
    "log": ("a.jsonl", read_access_log),
    "is log": ("a.jsonl", is_access_log),
    "mooncake": ("a.jsonl", lambda path: list(read_mooncake(path))),
    "sharegpt": ("a.jsonl", lambda path: list(read_sharegpt(path, iter([])))),
    "dataset": ("a.json", lambda path: sharegpt_requests(path, lambda text: [1], 1, 0)),
    "vcr": ("a.jsonl", read_vcr),
    "spans": ("a.json", lambda path: list(read_spans(path))),
    "is spans": ("a.json", is_otlp),
    "request log": ("a.jsonl", read_request_log),
    "scrapes": ("a.prom", read_scrapes),
    "is scrapes": ("a.prom", is_scrapes),
    "kv events": ("a.jsonl", read_kv_events),
    "is kv events": ("a.jsonl", is_kv_events),
    "gguf": ("m.gguf", GGUFFile),
    "config": ("config.json", lambda path: load_model(path.parent)),
    "tokenizer": ("tokenizer.json", lambda path: load_model(path.parent)),
    "weights": ("model.safetensors", lambda path: load_model(path.parent)),
    "adapter config": ("adapter_config.json", lambda path: read_adapter("a", path.parent)),
    "adapter": ("adapters.safetensors", lambda path: read_adapter("a", path.parent)),
    "finding": ("finding.json", lambda path: main(["hunt", "replay", str(path.parent)]) and refuse()),
    "rows of a size": ("r.jsonl", lambda path: _Known(path, "x")),
}


def refuse():
    raise ValueError("refused by the command")


def the_rest_of_a_folder(path):
    """Files that are needed beside the one under test."""
    if path.name in ("tokenizer.json", "model.safetensors"):
        (path.parent / "config.json").write_text(json.dumps({**COMMON, "model_type": "llama"}))
    if path.name == "adapters.safetensors":
        config = {"fine_tune_type": "lora", "lora_parameters": {"scale": 1.0}}
        (path.parent / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_are_opened(tmp_path, reader, kind):
    """A reader at a pipe that nobody writes to would wait forever, and one at /dev/zero would read forever."""
    name, read = READERS[reader]
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    the_rest_of_a_folder(path)
    outcome = []

    def run():
        try:
            outcome.append(read(path))
        except (ValueError, OSError) as problem:
            outcome.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive() and kind == "pipe":
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # let it go
    assert outcome, "it waits for the other side of the pipe"
    assert isinstance(outcome[0], ValueError | OSError) or outcome[0] is False


@pytest.mark.parametrize("reader", [name for name in READERS if not name.startswith("is ")])
def test_deep_nesting_is_an_error_like_any_other(tmp_path, reader):
    name, read = READERS[reader]
    path = tmp_path / name
    path.write_text(DEEP + "}\n")
    the_rest_of_a_folder(path)
    with pytest.raises((ValueError, OSError)):
        read(path)


def test_one_reader_of_json(tmp_path):
    assert json_value('{"a": 1}') == {"a": 1}
    for text in (DEEP, "{", "9" * 10_000, b"\xff"):
        with pytest.raises(ValueError, match=r"^here: "):
            json_value(text, "here")
    with pytest.raises(IsADirectoryError):
        open_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_bytes(tmp_path / "none")
    if sys.platform == "linux":
        with pytest.raises(ValueError, match="must be a regular file, got a device"):
            open_bytes("/dev/null")
