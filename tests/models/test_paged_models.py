"""Unmodified mlx-lm models over the paged KV pool: the logits of every step equal the plain model's."""

import dataclasses
import gc
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tiny_configurations import VOCAB_SIZE, WINDOW
from tiny_models import tiny_gathered_model, tiny_loaded_model, tiny_model

from workbench.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import Segment, pack
from workbench.kernels.attention import cpu_ops

pytestmark = pytest.mark.usefixtures("no_compilation")
BACKENDS = ("gather", "cpu", "dense")
BLOCK_SIZE = 8
NUM_BLOCKS = 64
TOLERANCE = 2e-4
"""Largest difference of float32 logits, relative to their spread; measured below 1e-5."""


@pytest.fixture(scope="module", autouse=True)
def no_engine_of_another_file():
    """An engine that was dropped without being closed keeps its patches until it is collected."""
    gc.collect()


def runner_for(model, backend="gather", **changes):
    settings = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "attention_backend": backend, **changes}
    return ModelRunner(model, EngineConfig(**settings))


def plain_logits(model, token_ids):
    """Logits of every position from mlx-lm's own cache: one sequence, one unchunked forward pass."""
    logits = model(mx.array([token_ids]), cache=make_prompt_cache(model))[0]
    return np.array(logits.astype(mx.float32))


def sequences(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB_SIZE, size=n).tolist() for n in lengths]


def packed_steps(token_ids, seed=0, block_size=BLOCK_SIZE):
    """Random schedules: chunks of any size among decodes, sequences joining and pausing, blocks in random order.

    Yields:
        (segments, positions of the rows whose logits are wanted as (sequence, position)).
    """
    rng = random.Random(seed)
    pool = list(range(1, NUM_BLOCKS))
    rng.shuffle(pool)
    tables = [[] for _ in token_ids]
    computed = [0] * len(token_ids)
    while any(done < len(tokens) for done, tokens in zip(computed, token_ids)):
        order = [i for i, tokens in enumerate(token_ids) if computed[i] < len(tokens)]
        rng.shuffle(order)
        segments, wanted = [], []
        for index in order[: rng.randint(1, len(order))]:
            start = computed[index]
            left = len(token_ids[index]) - start
            num_tokens = 1 if rng.random() < 0.4 else rng.randint(1, min(left, 14))
            end = start + num_tokens
            while len(tables[index]) * block_size < end:
                tables[index].append(pool.pop())
            samples = rng.random() < 0.7
            segments.append(
                Segment(tables[index], start, num_tokens, token_ids[index][start:end], samples, f"s{index}")
            )
            wanted += [(index, end - 1)] if samples else []
            computed[index] = end
        yield segments, wanted


def largest_error(runner, token_ids, seed=0, change=lambda packed, step: packed):
    """Largest difference between packed and plain logits over all steps, relative to the spread of the logits."""
    runner_model = runner.model
    reference = [plain_logits(runner_model, tokens) for tokens in token_ids]
    spread = max(float(logits.std()) for logits in reference)
    worst, num_rows, previous = 0.0, 0, None
    for step, (segments, wanted) in enumerate(packed_steps(token_ids, seed)):
        packed = pack(segments, BLOCK_SIZE, num_blocks=NUM_BLOCKS, previous=previous)
        logits = runner.forward(change(packed, step))[0].values
        assert logits.shape == (len(wanted), VOCAB_SIZE) and logits.dtype == mx.float32
        for row, (index, position) in zip(np.array(logits), wanted, strict=True):
            worst = np.maximum(worst, np.abs(row - reference[index][position]).max() / spread)  # keeps a NaN
        num_rows += len(wanted)
        previous = packed
    assert num_rows > len(token_ids)
    return worst


MODELS = {
    "llama": ("llama", {}),
    "llama with linear RoPE scaling": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma3_text": ("gemma3_text", {}),
    "mixtral": ("mixtral", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt2": ("gpt2", {}),
    "cohere2": ("cohere2", {}),
    "ministral3": ("ministral3", {}),
    "nanochat": ("nanochat", {}),
}
"""In an order in which every backend meets windows, also where each model runs with one of them."""


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_step_has_the_logits_of_the_plain_model(name, backend):
    architecture, changes = MODELS[name]
    runner = runner_for(tiny_model(architecture, **changes), backend)
    assert runner.mode == "kernel"
    assert max(map(len, token_ids := sequences([29, 3, 41, 17, 1]))) > 4 * WINDOW
    assert largest_error(runner, token_ids) < TOLERANCE
    runner.close()


def test_keys_and_values_of_different_widths():
    runner = runner_for(tiny_model("deepseek_v2"))
    assert runner.mode == "kernel" and {(k.k_head_dim, k.v_head_dim) for k in runner.preflight.layers} == {(24, 16)}
    assert largest_error(runner, sequences([29, 3, 41, 17, 1])) < TOLERANCE
    runner.close()


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "architecture",
    ["gemma2", "deepseek_v2", "deepseek_v3", "plamo", "plamo3", "iquestloopcoder", "gemma4_text", "gemma3n", "llama4"],
)
def test_models_whose_attention_is_read(architecture, backend):
    runner = runner_for(tiny_model(architecture), backend)
    assert runner.mode == "kernel"
    assert largest_error(runner, sequences([29, 3, 41, 17, 1])) < TOLERANCE
    runner.close()


def test_a_model_whose_attention_cannot_be_read_gets_gathered_context():
    runner = runner_for(tiny_gathered_model())
    assert runner.mode == "gather"
    assert largest_error(runner, sequences([29, 3, 41, 17, 1])) < TOLERANCE
    runner.close()


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gpt2"])
def test_shifted_positions_fail_the_comparison(architecture, backend):
    """The negative control. RoPE depends on distances only, so the first steps are unchanged."""

    def shift(packed, step):
        return dataclasses.replace(packed, positions=packed.positions + np.int32(3 * (step > 1)))

    runner = runner_for(tiny_model(architecture), backend)
    assert largest_error(runner, sequences([29, 3, 41, 17, 1]), change=shift) > 100 * TOLERANCE
    runner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped_blocks_fail_the_comparison(backend):
    def swap_blocks(packed, step):
        table = packed.block_table.copy()
        if table.shape[1] > 1:
            table[:, :2] = table[:, 1::-1]
        return dataclasses.replace(packed, block_table=table)

    runner = runner_for(tiny_model("llama"), backend)
    assert largest_error(runner, sequences([29, 3, 41, 17, 1]), change=swap_blocks) > 100 * TOLERANCE
    runner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_written_by_a_batch_mate_can_be_read_in_the_same_step(backend):
    """Prefix caching publishes blocks when they are scheduled: layer by layer, all writes come before any read."""
    runner = runner_for(tiny_model("gemma3_text"), backend)
    first, second = sequences([24, 24])
    second[:16] = first[:16]
    reference = plain_logits(runner.model, second)[-1]
    packed = pack([Segment([3, 4, 7], 16, 8, second[16:]), Segment([3, 4, 6], 0, 24, first)], BLOCK_SIZE)
    logits = runner.forward(packed)[0].rows
    assert np.abs(logits[0] - reference).max() < TOLERANCE * reference.std()
    runner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_samples_nothing_writes_its_keys_and_computes_no_logits(backend):
    model = tiny_model("qwen3")
    runner = runner_for(model, backend)
    [tokens] = sequences([13])
    nothing, _ = runner.forward(pack([Segment([5, 2], 0, 12, tokens[:12], samples=False)], BLOCK_SIZE))
    assert nothing.values.shape == (0, VOCAB_SIZE)
    logits = runner.forward(pack([Segment([5, 2], 12, 1, tokens[12:])], BLOCK_SIZE))[0].rows
    reference = plain_logits(model, tokens)[-1]
    assert np.abs(logits[0] - reference).max() < TOLERANCE * reference.std()
    runner.close()


def test_only_wanted_rows_reach_the_head():
    model = tiny_model("llama")
    runner = runner_for(model)
    seen = []
    head = type(model.lm_head)

    class Spy(head):
        def __call__(self, x):
            seen.append(x.shape)
            return super().__call__(x)

    model.lm_head.__class__ = Spy
    tokens = sequences([12, 5, 7])
    runner.forward(
        pack(
            [
                Segment([1, 2], 0, 12, tokens[0]),
                Segment([3], 0, 5, tokens[1], samples=False),
                Segment([4], 0, 7, tokens[2]),
            ],
            BLOCK_SIZE,
        )
    )
    assert seen == [(2, 1, 64)]
    runner.close()


def test_one_model_call_per_step():
    model = tiny_model("llama")
    runner = runner_for(model)
    calls = []

    class Counted(type(model)):
        def __call__(self, *args, **kwargs):
            calls.append(args[0].shape)
            return super().__call__(*args, **kwargs)

    model.__class__ = Counted
    steps = [pack(segments, BLOCK_SIZE) for segments, _ in packed_steps(sequences([29, 3, 41]))]
    for packed in steps:
        runner.forward(packed)
    assert calls == [(packed.num_tokens, 1) for packed in steps]
    runner.close()


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [("gemma3_text", "gather"), ("gemma3_text", "cpu"), ("gemma2", "cpu"), ("deepseek_v3", "cpu"), ("gathered", "cpu")],
)
def test_the_earlier_content_of_a_block_never_shows(architecture, backend):
    """Blocks of finished requests keep their content, and 0 * NaN is NaN."""
    runner = runner_for(tiny_loaded_model(architecture).model, backend)
    for layer in runner.kv_cache.layers:
        keys, values = (mx.full(array.shape, mx.nan) for array in layer.state)
        layer.k_cache, layer.v_cache = keys, keys if layer.k_cache is layer.v_cache else values
    mx.eval(runner.kv_cache.arrays)
    assert largest_error(runner, sequences([29, 3, 41, 17, 1])) < TOLERANCE
    runner.close()


# -- several users of one module ------------------------------------------------------------------------------


def test_two_models_of_one_module_are_served_side_by_side():
    one, two = (runner_for(tiny_model("llama", seed=seed), backend) for seed, backend in ((1, "gather"), (2, "cpu")))
    tokens = sequences([19, 26])
    expected = [plain_logits(runner.model, t)[-1] for runner, t in zip((one, two), tokens)]
    for start, end in ((0, 11), (11, 99)):
        for runner, t in zip((one, two), tokens):
            part = t[start:end]
            runner.forward(pack([Segment([9, 1, 4, 2], start, len(part), part)], BLOCK_SIZE))
    logits = [
        runner.forward(pack([Segment([9, 1, 4, 2], len(t) - 1, 1, t[-1:])], BLOCK_SIZE))[0].rows[0]
        for runner, t in zip((one, two), tokens)
    ]
    for row, reference in zip(logits, expected):
        assert np.abs(row - reference).max() < TOLERANCE * reference.std()
    one.close()
    assert largest_error(two, sequences([29, 3, 41])) < TOLERANCE
    two.close()


def test_one_model_can_have_two_runners():
    model = tiny_model("gpt_oss")
    one, two = runner_for(model), runner_for(model, "cpu")
    assert largest_error(one, sequences([29, 3, 41])) < TOLERANCE
    one.close()
    assert largest_error(two, sequences([29, 3, 41]), seed=1) < TOLERANCE
    two.close()


def test_the_plain_model_works_while_it_is_served_and_is_restored_afterwards():
    model = tiny_model("llama")
    [tokens] = sequences([15])
    before = plain_logits(model, tokens)
    attention, norm = llama.scaled_dot_product_attention, type(model.model.norm)
    runner = runner_for(model)
    assert llama.scaled_dot_product_attention is not attention
    assert np.array_equal(plain_logits(model, tokens), before)
    runner.close()
    runner.close()
    assert llama.scaled_dot_product_attention is attention and type(model.model.norm) is norm
    assert np.array_equal(plain_logits(model, tokens), before)


def test_a_runner_that_is_dropped_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    attention, norm = llama.scaled_dot_product_attention, type(model.model.norm)
    runner_for(model)
    gc.collect()
    assert llama.scaled_dot_product_attention is attention and type(model.model.norm) is norm
    runner = runner_for(model)
    assert llama.scaled_dot_product_attention is not attention  # held while it is in use
    runner.close()


def test_the_parameters_keep_their_names():
    from mlx.utils import tree_flatten

    model = tiny_model("llama")
    names = [name for name, _ in tree_flatten(model.parameters())]
    runner = runner_for(model)
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    runner.close()


def test_caches_outside_of_a_step_say_so():
    runner = runner_for(tiny_model("llama"))
    with pytest.raises(RuntimeError, match="no step is in progress"):
        mx.eval(runner.model(mx.array([[1]]), cache=runner.kv_cache.layers))
    runner.close()


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_compiled_swiglu_stands_in_on_a_cpu_while_a_batch_runs(architecture, monkeypatch):
    monkeypatch.setattr("workbench.models.patch.MIN_COMPILED_SIZE", 1)
    sizes = []
    swiglu = cpu_ops.swiglu
    monkeypatch.setattr(cpu_ops, "swiglu", lambda gate, up: sizes.append(gate.size) or swiglu(gate, up))
    runner = runner_for(tiny_model(architecture), "cpu")
    assert largest_error(runner, sequences([29, 3, 41])) < TOLERANCE
    assert len(sizes) > 4 and min(sizes) >= 96
    sizes.clear()
    plain_logits(runner.model, [1, 2, 3])
    with mx.stream(mx.cpu):
        mx.eval(mx.grad(lambda x: llama.swiglu(x, x).sum())(mx.ones(8)))  # training in the same process still works
    assert not sizes
    runner.close()
    assert not hasattr(llama.swiglu, "original")


def test_few_elements_are_left_to_mlx(monkeypatch):
    monkeypatch.setattr(cpu_ops, "swiglu", lambda gate, up: pytest.fail("waiting costs more than it saves here"))
    runner = runner_for(tiny_model("llama"), "cpu")
    assert largest_error(runner, sequences([29, 3, 41])) < TOLERANCE
    runner.close()


# -- refusals -------------------------------------------------------------------------------------------------


def test_blocks_outside_the_pool_are_refused_before_anything_is_written():
    runner = runner_for(tiny_model("llama"))
    before = [np.array(array) for array in runner.kv_cache.arrays]
    with pytest.raises(ValueError, match=r"sequence 1 \(request 'b'\): block id 64 is outside the pool of 64"):
        runner.forward(pack([Segment([1], 0, 1, [1]), Segment([64], 0, 1, [1], True, "b")], BLOCK_SIZE))
    with pytest.raises(ValueError, match="block_size 4, the pool has 8"):
        runner.forward(pack([Segment([1], 0, 1, [1])], 4))
    assert all(np.array_equal(a, b) for a, b in zip(before, runner.kv_cache.arrays))
    runner.close()


def test_a_pool_larger_than_the_machine_is_refused(monkeypatch):
    monkeypatch.setattr("workbench.engine.memory.usable_memory", lambda: 2**20)
    with pytest.raises(ValueError, match=r"num_blocks=900 needs .* GiB of KV cache .*use at most 64 blocks"):
        runner_for(tiny_model("llama"), num_blocks=900)


def test_a_step_whose_gathered_context_is_larger_than_the_machine_is_refused(monkeypatch):
    runner = runner_for(tiny_gathered_model())
    monkeypatch.setattr("workbench.engine.forward.gathering.usable_memory", lambda: 2**16)
    with pytest.raises(ValueError, match=r"29 tokens with a context of 32.*lower max_num_batched_tokens"):
        runner.forward(pack([Segment([1, 2, 3, 4], 0, 29, list(range(29)))], BLOCK_SIZE))
    runner.close()


def test_a_failed_step_leaves_the_runner_usable(monkeypatch):
    runner = runner_for(tiny_model("llama"))
    tokens = sequences([29, 3])

    def explode(*_args, **_options):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(type(runner.backend), "write_and_attend", explode)
        with pytest.raises(RuntimeError, match="planted"):
            runner.forward(pack([Segment([1], 0, 3, tokens[1])], BLOCK_SIZE))
    assert largest_error(runner, tokens) < TOLERANCE
    runner.close()


# -- facts for a step's record and a trace --------------------------------------------------------------------


def test_the_kernel_launch_of_a_step():
    runner = runner_for(tiny_loaded_model("gemma3_text"), "cpu")
    packed = pack([Segment([1, 2], 0, 12, list(range(12)))], BLOCK_SIZE)
    _, launch = runner.forward(packed)
    assert (launch.backend, launch.num_heads, launch.num_kv_heads, launch.head_dim) == ("cpu", 4, 2, 16)
    assert launch.dtype == "float32" and launch.windows == (WINDOW, -1, WINDOW, -1)
    assert min(item.kv_end - item.kv_start for item in launch.work_items) <= 12
    [item] = runner.forward(pack([Segment([1, 2], 12, 1, [12])], BLOCK_SIZE))[1].work_items
    assert (item.kv_start, item.kv_end) == (13 - WINDOW, 13)  # the window counts the token itself
    assert launch.details == {"forward": "layer by layer"}
    facts = runner.describe()
    assert facts["forward"] == "layer by layer" and facts["forward_not_taken"] == {
        "compiled": "its weights are not packed",
        "replayed": "'cpu' attention has no graph",
    }
    assert facts["name"] == "tiny-gemma3_text" and facts["attention_mode"] == "kernel"
    assert facts["kv_bytes_per_block"] == BLOCK_SIZE * 4 * 2 * 2 * 16 * 4 == runner.bytes_per_block
    assert runner.kv_cache.nbytes == NUM_BLOCKS * runner.bytes_per_block
    runner.close()


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_a_step_does_not_copy_the_cache(backend):
    """A pool of 320 MB: no layer's array is copied, as MLX would do if something else held its buffer."""
    model = tiny_model("llama", num_key_value_heads=4, head_dim=64)
    runner = runner_for(model, backend, num_blocks=40 * 2**20 // (BLOCK_SIZE * 4 * 64 * 4))
    array_bytes = runner.kv_cache.arrays[0].nbytes
    assert runner.kv_cache.nbytes >= 256 * 2**20 and array_bytes == 40 * 2**20
    tokens = sequences([40])[0]

    def peak_growth(start, num_tokens):
        mx.synchronize()
        gc.collect()
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        runner.forward(pack([Segment([7, 3, 9, 1, 5], start, num_tokens, tokens[:num_tokens])], BLOCK_SIZE))
        return mx.get_peak_memory() - active

    peak_growth(0, 30)
    assert peak_growth(30, 8) < array_bytes / 8
    assert peak_growth(38, 1) < array_bytes / 8
    views = [layer.k_cache.reshape(-1) for layer in runner.kv_cache.layers]
    mx.eval(views)
    if backend == "gather":  # MLX writes here; the control: while a view is held, whole arrays are copied
        assert peak_growth(39, 1) > array_bytes
    runner.close()
