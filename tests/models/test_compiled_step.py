"""The compiled forward pass against the model's own layers: logits, tokens, threads, and models it must refuse."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.kernels.cpu.kernels import ROWS
from workbench.kernels.cpu.layer_loop import run_layers
from workbench.models.packed import step_check
from workbench.models.packed.description import Description
from workbench.models.packed.pack_model import pack_model, why_not_packed

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

DESCRIBED = ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "smollm3"]
CHANGES = {"phi3": {"partial_rotary_factor": 1.0}}
REFUSED = ["mixtral", "olmo2", "gpt2", "cohere", "glm4"]


def packed_model(architecture, **changes):
    loaded = tiny_loaded_model(architecture, **CHANGES.get(architecture, {}), **changes)
    pack_model(loaded.model)
    return loaded


def run_engine(loaded, by_layer=False, **config):
    """Token ids and the log-probabilities of every request, under chunking and preemption."""
    limits = {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 4}
    engine = Engine(loaded, EngineConfig(**(limits | config)))
    if by_layer:
        engine.runner.path = engine.runner.watched_path
    random = np.random.default_rng(3)
    for length in (3, 11, 18, 5):
        prompt = random.integers(0, 260, length).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3))
    outputs = engine.run(progress=False)
    refused = engine.runner.not_taken.get("compiled", "")
    engine.close()
    return [(output.token_ids, output.logprobs) for output in outputs], refused


@pytest.mark.parametrize("architecture", DESCRIBED)
def test_an_engine_gives_the_same_tokens_as_layer_by_layer(architecture):
    loaded = packed_model(architecture)
    compiled, reason = run_engine(loaded)
    assert reason == ""
    by_layer, _ = run_engine(loaded, by_layer=True)
    for (tokens, logprobs), (expected, expected_logprobs) in zip(compiled, by_layer, strict=True):
        assert tokens == expected
        for step, expected_step in zip(logprobs, expected_logprobs, strict=True):
            assert step == pytest.approx(expected_step, abs=1e-4)


def test_checks_and_steps_share_their_code(monkeypatch):
    for kept in ("_codes", "_calls"):
        monkeypatch.setattr(run_layers, kept, {})
    loaded = packed_model("llama")
    run_engine(loaded)
    assert len(run_layers._codes) == 1, "compiling it takes seconds"


def test_widths_that_fill_no_vector():
    """Weights of 16 and 32 bits may have any number of columns."""
    loaded = packed_model("qwen2", hidden_size=60, intermediate_size=77, head_dim=30, num_attention_heads=2)
    compiled, reason = run_engine(loaded)
    assert reason == ""
    by_layer, _ = run_engine(loaded, by_layer=True)
    assert [tokens for tokens, _ in compiled] == [tokens for tokens, _ in by_layer]


def test_the_number_of_threads_changes_nothing(monkeypatch):
    loaded = packed_model("gemma3_text")
    monkeypatch.setenv("WORKBENCH_THREADS", "1")
    alone = run_engine(loaded)
    for threads in ("2", "3", "8"):
        monkeypatch.setenv("WORKBENCH_THREADS", threads)
        assert run_engine(loaded) == alone  # log-probabilities to the last bit


def long_prompt(by_layer=False):
    """Log-probabilities after a prompt that takes several turns of `ROWS` rows in one step."""
    engine = Engine(packed_model("gemma3_text"), EngineConfig(num_blocks=40, block_size=16, max_num_batched_tokens=512))
    if by_layer:
        engine.runner.path = engine.runner.watched_path
    prompt = np.random.default_rng(5).integers(0, 260, 2 * ROWS + 21).tolist()
    engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True, logprobs=3))
    (output,) = engine.run(progress=False)
    engine.close()
    return output.logprobs


def test_a_long_prompt_takes_turns_of_rows(monkeypatch):
    monkeypatch.setenv("WORKBENCH_THREADS", "1")
    alone = long_prompt()
    for step, expected in zip(alone, long_prompt(by_layer=True), strict=True):
        assert step == pytest.approx(expected, abs=1e-4)
    monkeypatch.setenv("WORKBENCH_THREADS", "3")
    assert long_prompt() == alone  # to the last bit


def test_memory_of_a_step_grows_little_with_its_rows():
    """The widest projections have ROWS rows at most, in the memory of queries, keys and values."""
    engine = Engine(packed_model("llama"), EngineConfig(num_blocks=20, block_size=4))
    step, logits = engine.runner.path.step, np.empty((1, 260), np.float32)
    few, many = step._buffers(2, logits), step._buffers(4 * ROWS, logits)
    assert len(few.gate_up) == 2 and len(many.gate_up) == ROWS
    assert len(many.out) == ROWS and many.prepared.size == ROWS // 2 * few.prepared.size
    assert np.shares_memory(many.gate_up, many.qkv) and not np.shares_memory(many.qkv, many.attended)
    engine.close()


@pytest.mark.parametrize("value", ["0", "two", "-1", "5000", "²", ""])
def test_a_wrong_number_of_threads_is_refused(value, monkeypatch):
    monkeypatch.setenv("WORKBENCH_THREADS", value)
    attention = llama.scaled_dot_product_attention
    with pytest.raises(ValueError, match=f"WORKBENCH_THREADS='{value}' must be an integer from 1 to 1024"):
        run_engine(packed_model("llama"))
    assert llama.scaled_dot_product_attention is attention, "a failed engine leaves the model as it was"


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_model_with_other_parts_runs_layer_by_layer(architecture):
    assert run_engine(packed_model(architecture))[1].startswith("the model has")


def test_a_wrong_description_is_refused(monkeypatch):
    """The control: a scale of attention that is off by a tenth shows in the logits."""
    honest = Description.variants

    def wrong(self):
        for tables, scale in honest(self):
            yield tables._replace(scales=tables.scales * np.float32(1.1)), scale

    monkeypatch.setattr(Description, "variants", wrong)
    outputs, reason = run_engine(packed_model("llama"))
    assert reason.startswith("its logits in compiled code differ by")
    assert len(outputs) == 4


def test_a_captured_layer_sees_the_step_and_the_next_one_is_compiled_again():
    engine = Engine(packed_model("llama"), EngineConfig(num_blocks=20, block_size=4))
    engine.add_request([5, 6, 7, 8, 9], SamplingParams(max_tokens=6, ignore_eos=True))
    capture = engine.capture(layer=1)
    watched = {"forward": "layer by layer", "forward_reason": "a layer is looked at"}
    assert engine.step().kernel.details == watched and capture.q.shape == (5, 4, 16)
    name, _ = engine.step_into()
    while name != "layer 2":
        name, made = engine.step_into()
    assert made.k.shape == (1, 2, 16)
    engine.run(progress=False)
    stepped, *others = (step.kernel.details for step in engine.trace[1:])
    assert stepped == watched and all(details == {"forward": "compiled"} for details in others)
    assert (engine.describe()["forward"], engine.describe()["forward_not_taken"]) == ("compiled", {})
    assert mx.default_device() == mx.cpu
    engine.close()


@pytest.mark.parametrize(("control", "reason"), [(1.3e-4, ""), (9e-5, "and by 9.0e-05 with positions shifted by 3")])
def test_a_model_that_depends_little_on_positions_needs_a_control_above_the_tolerance(control, reason, monkeypatch):
    monkeypatch.setattr(step_check, "worst_error", lambda logits, _: control if len(logits) == 1 else 2.5e-6)
    engine = Engine(packed_model("llama"), num_blocks=8)
    refused = engine.runner.not_taken.get("compiled", "")
    assert refused.endswith(reason) and bool(refused) == bool(reason)
    engine.close()
