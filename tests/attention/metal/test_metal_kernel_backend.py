"""The backends around the Metal kernels: planning, records, selection, and a real model on msl."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from exactness import compare_every_step
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, assert_close, build
from msl_runs import skip_without_compiler
from tiers import examples
from tiny_models import tiny_model

from workbench import EngineConfig, SamplingParams, msl
from workbench.apps.cli.kernel import is_wrong, print_check, probes, try_backend
from workbench.engine import model_runner
from workbench.kernels.attention import paged_varlen_attention
from workbench.kernels.attention import selection as selection_module
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.metal import launch
from workbench.kernels.attention.metal.backend import MetalBackend, MslBackend
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.attention.metal.plan import MIN_KV_SPLIT, TARGET_THREADGROUPS, choose_kv_split, plan_launch
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.selection import get_backend, resolve_backend_name, select_backend
from workbench.models.preflight import preflight

skip_without_compiler()

LLAMA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float16"}


@pytest.mark.parametrize(
    ("kv_lens", "num_kv_heads", "expected"),
    [
        ([100] * 500, 8, None),
        ([8192], 8, 256),
        ([32768], 8, 1024),
        ([8192] * 64, 8, None),
        ([8192] + [200] * 26, 3, 256),
        ([300], 1, 256),
        ([256], 1, None),
    ],
)
def test_splits_follow_from_the_amount_of_work(kv_lens, num_kv_heads, expected):
    assert choose_kv_split(np.array(kv_lens), num_kv_heads) == expected


def test_a_lone_long_decode_fills_the_gpu():
    kv_split = choose_kv_split(np.array([100_000]), 2)
    assert kv_split > MIN_KV_SPLIT and 2 * 100_000 / kv_split >= TARGET_THREADGROUPS / 2


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), min_size=1, max_size=9),
    st.integers(1, 32),
    st.sampled_from([-1, 0, 9, 64]),
    st.sampled_from([8, 24, 100, 1000]),
)
def test_every_row_is_written_or_merged_once(lengths, block_q, window, kv_split):
    metadata = AttentionMetadata(
        np.cumsum([0, *(rows for rows, _ in lengths)]).astype(np.int32),
        np.array([rows + more for rows, more in lengths], dtype=np.int32),
        np.zeros((len(lengths), 100), dtype=np.int32),
        None,
        8,
    )
    plan = plan_launch(metadata, block_q=block_q, window=window, num_kv_heads=2, kv_split=kv_split)
    written, partial = np.zeros(metadata.num_tokens, int), np.zeros(plan.num_partial_rows, int)
    partial_of_row = [[] for _ in range(metadata.num_tokens)]
    for seq, q_start, num_rows, _, _, split, num_splits, first_position, partial_start in plan.items.tolist():
        assert first_position == metadata.seqused_k[seq] - (metadata.cu_seqlens_q[seq + 1] - q_start)
        if num_splits == 1:
            assert partial_start == -1
            written[q_start : q_start + num_rows] += 1
            continue
        written[q_start : q_start + num_rows] += split == 0  # a placeholder until the merged row replaces it
        partial[partial_start : partial_start + num_rows] += 1
        for row in range(num_rows):
            partial_of_row[q_start + row].append(partial_start + row)
    assert (written == 1).all() and (partial == 1).all()
    merged = {
        row: [first + split * between for split in range(count)]
        for row, (first, between, count) in zip(plan.merged_rows.tolist(), plan.merge_rows.tolist(), strict=True)
    }
    assert merged == {row: partials for row, partials in enumerate(partial_of_row) if partials}


def test_layers_share_a_plan():
    batch = build(Case(((1, 700), (30, 60)), 4, 2, 64, 16, "float16"))
    kernels = MslBackend().kernels
    assert kernels.plan(batch.metadata, 4, 2, 64, 2) is kernels.plan(batch.metadata, 4, 2, 64, 2)
    assert kernels.plan(batch.metadata, 4, 2, 64, 2) is not kernels.plan(batch.metadata, 4, 2, 64, 2, 16)


def test_the_record_is_the_launch():
    batch = build(Case(((1, 700), (30, 60)), 8, 2, 64, 16, "float16"))
    record = MslBackend().describe(batch.metadata, 8, 2, 64, "float16")
    assert (record.backend, record.threadgroup, record.block_q, record.block_kv) == ("msl", (128, 1, 1), 8, 32)
    assert record.grid == (128 * len(record.work_items), 2, 1)
    assert [item.num_splits for item in record.work_items] == [3, 3, 3, 1, 1, 1, 1]
    assert record.details["merged_rows"] == 1


def test_public_function_through_msl():
    batch = build(Case(((1, 60), (9, 30)), 4, 2, 64, 16))
    metadata = batch.metadata
    table = np.where(metadata.block_table < batch.k_cache.shape[0], metadata.block_table, 0)
    arrays = {"cu_seqlens_q": metadata.cu_seqlens_q, "seqused_k": metadata.seqused_k, "block_table": table}
    out = paged_varlen_attention(*batch.inputs[:3], **arrays, softmax_scale=batch.scale, backend="msl")
    assert_close(out, batch.reference(), "float32")


@pytest.mark.parametrize(
    ("gpu", "metal", "expected"), [(True, True, "metal"), (True, False, "cuda"), (False, False, "cpu")]
)
def test_auto(monkeypatch, gpu, metal, expected):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu if gpu else mx.cpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert resolve_backend_name("auto") == expected


def test_a_backend_that_cannot_run_here_says_so():
    if mx.metal.is_available():
        pytest.skip("this machine has an Apple GPU")
    with pytest.raises(RuntimeError, match="'metal' is not available here: it needs an Apple GPU; use one of auto, "):
        get_backend("metal")


@pytest.fixture
def apple_gpu(monkeypatch):
    """A machine whose Apple GPU is msl."""

    class PretendedMetal(MetalBackend):
        kernel_maker = staticmethod(lambda: msl.metal_kernel)

    def get(name):
        return PretendedMetal() if name in ("auto", "metal") else get_backend(name)

    monkeypatch.setattr(selection_module, "get_backend", get)
    monkeypatch.setattr(selection_module, "resolve_backend_name", lambda name: "metal" if name == "auto" else name)


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_self_test_passes(apple_gpu, dtype):
    chosen = select_backend("auto", **{**LLAMA, "dtype": dtype})
    assert (chosen.backend.name, chosen.fallback_reason) == ("metal", "")
    assert 0 < chosen.self_test_error < 1e-2 and chosen.self_test_seconds > 0


def test_a_kernel_that_computes_something_else_is_not_used(apple_gpu, monkeypatch):
    source = launch.metal_source
    monkeypatch.setattr(launch, "metal_source", lambda name: source(name).replace("- window[0]", "- 2 - window[0]"))
    assert select_backend("auto", **LLAMA).backend.name == "metal"  # no window in it: this fault must not matter
    monkeypatch.setattr(launch, "metal_source", lambda name: source(name).replace("row.total * rescale", "row.total"))
    chosen = select_backend("auto", **LLAMA)
    assert chosen.backend.name == "gather"
    assert "the metal kernel differs from float64 by" in chosen.fallback_reason
    with pytest.raises(RuntimeError, match="workbench kernel check"):
        select_backend("metal", **LLAMA)


def test_a_kernel_that_does_not_compile_is_not_used(apple_gpu, monkeypatch):
    monkeypatch.setattr(launch, "metal_source", lambda name: "no Metal at all")
    chosen = select_backend("auto", **LLAMA)
    assert chosen.backend.name == "gather" and "paged_varlen" in chosen.fallback_reason


def test_a_model_without_a_variant(apple_gpu):
    chosen = select_backend("auto", **{**LLAMA, "block_size": 4})
    assert chosen.backend.name == "gather" and "block_size is 4" in chosen.fallback_reason
    with pytest.raises(ValueError, match="head_dim is 24"):
        select_backend("metal", **{**LLAMA, "head_dim": 24})


def test_engine_on_a_gpu_falls_back_with_the_reason(apple_gpu, monkeypatch):
    """The preflight of the model notices one fault, only the self-test on longer contexts notices the other."""
    monkeypatch.setattr(model_runner, "get_backend", selection_module.get_backend)
    config = EngineConfig(num_blocks=32, block_size=8)
    runner = model_runner.ModelRunner(tiny_model("llama"), config)
    runner.close()
    assert (runner.backend_name, runner.mode, runner.fallback_reason) == ("metal", "kernel", "")
    source = launch.metal_source
    for old, new in (("row.total * rescale", "row.total"), ("split * rows_between", "split")):
        monkeypatch.setattr(launch, "metal_source", lambda name, old=old, new=new: source(name).replace(old, new))
        runner = model_runner.ModelRunner(tiny_model("llama"), config)
        runner.close()
        assert (runner.backend_name, runner.mode) == ("gather", "kernel")
        assert runner.describe()["attention_fallback_reason"] == runner.fallback_reason != ""


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "phi3"])
def test_models_with_windows_and_sinks_through_msl(architecture):
    assert preflight(tiny_model(architecture), MslBackend()).mode == "kernel"


def test_msl_needs_no_self_test():
    chosen = select_backend("msl", **LLAMA)
    assert (chosen.backend.name, chosen.self_test_error) == ("msl", None)


def test_kernel_check_prints_a_table(capsys, monkeypatch):
    some = [probe for probe in probes() if probe.name in ("decodes", "long context, split")]
    monkeypatch.setattr("workbench.apps.cli.kernel.probes", lambda full: some)
    assert len(some) == 2 and print_check(["msl", "gather"]) == 0
    table = capsys.readouterr().out
    assert "msl v1" in table and "every result is right" in table


def test_kernel_check_sees_a_wrong_kernel(monkeypatch):
    source = launch.metal_source
    monkeypatch.setattr(launch, "metal_source", lambda name: source(name).replace("row.total * rescale", "row.total"))
    probe = next(probes())
    assert is_wrong(try_backend(MslBackend(), probe), probe)


@pytest.mark.repeats(of="test_models_with_windows_and_sinks_through_msl")
def test_a_model_through_msl(smollm2):
    """Every step of SmolLM2 on the Metal source: the logits of the plain model."""
    prompts = {"q0": smollm2.tokenizer.encode("The capital of France is"), "q1": list(range(40, 70))}
    worst, spread = compare_every_step(smollm2, prompts, "msl", SamplingParams(max_tokens=2))
    assert worst < 1e-3, f"largest difference {worst:.2e} (logits spread over {spread:.1f})"


@pytest.mark.parametrize("kv_split", [None, 16])
@pytest.mark.parametrize(
    "changes", [{}, {"left": 9}, {"chunk_size": 16}, {"num_kv_heads": 1, "latent": True, "value_dim": 32}]
)
def test_a_long_dispatch_is_cut_into_runs_of_rows(changes, kv_split):
    """The same bits, and no dispatch costs more than the limit."""
    sequences = ((40, 90), (1, 70), (0, 3), (33, 40), (1, 9))
    batch = build(Case(sequences, 4, **{"num_kv_heads": 2, "head_dim": 64, **changes}))
    rows = []

    def counted(**text):
        kernel = msl.metal_kernel(**text)

        def launch(**arguments):
            rows.append(arguments["inputs"][0].shape[0]) if text["name"].startswith("paged") else None
            return kernel(**arguments)

        return launch

    whole, kernels = PagedVarlenKernels(counted), PagedVarlenKernels(counted)
    expected = np.array(whole.attend(*batch.inputs, batch.options, kv_split=kv_split))
    assert rows == [75]
    kernels.max_dispatch_flop = 4 * 10 * 40 * 2 * 128.0
    rows.clear()
    cut = replace(batch.metadata, derived={})
    result = kernels.attend(*batch.inputs[:3], cut, batch.options, kv_split=kv_split)
    assert len(rows) > 3 and sum(rows) == 75
    np.testing.assert_array_equal(np.array(result), expected)


def test_the_limit_of_a_dispatch():
    """2,048 rows at 128k positions are cut, and a step of SmolLM2 is not."""
    kernels = PagedVarlenKernels(lambda **_: lambda **given: [mx.zeros(shape) for shape in given["output_shapes"]])
    for rows, context, heads, dim, parts in ((2048, 131072, 32, 128, range(32, 64)), (512, 2048, 9, 64, range(1))):
        table = np.zeros((1, context // 16), np.int32)
        metadata = AttentionMetadata(np.array([0, rows], np.int32), np.array([context], np.int32), table, None, 16)
        shapes = (rows, heads, dim), (8, 16, heads, dim)
        launch = kernels._prepared(
            *shapes, mx.float16, metadata, AttentionOptions(1.0), None, value_dim=dim, latent=False
        )
        assert len(launch.parts) in parts
        assert all(end - begin >= 8 for begin, end, _ in launch.parts)


@pytest.mark.parametrize("place", ["metadata", "metal.plan"])
def test_a_table_that_is_not_filled_up_is_refused(monkeypatch, place):
    """MLX would pass it as constants, and compile another kernel when a run first meets it."""
    monkeypatch.setattr(f"workbench.kernels.attention.{place}.filled_up", lambda table: table)
    batch = build(Case(((1, 20),), 2, 1, 32, 16))
    with pytest.raises(RuntimeError, match="elements, which takes another kernel"):
        PagedVarlenKernels(msl.metal_kernel).attend(*batch.inputs, batch.options, kv_split=8)


def test_metal_computes_with_safe_mathematics(monkeypatch):
    """The kernels rely on exp2(-inf) being 0, and on NaN: Metal's fast mathematics assumes that neither occurs."""
    made = []
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **text: made.append(text) or (lambda **_: []))
    MetalBackend().kernels.kernel("paged_varlen")
    assert [text["compile_options"] for text in made] == [{"math_mode": "safe"}]
