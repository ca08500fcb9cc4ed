"""`scripts/dump_metal_sources.py`: what a Mac compiles with Apple's compiler is what a launch hands to MLX."""

import contextlib
import io
import re

import dump_metal_sources
import mlx.core as mx
import pytest
from msl_runs import skip_without_compiler

from workbench.kernels.attention.metal.launch import kernel_text


def test_the_kernels_of_one_variant():
    texts = dict(dump_metal_sources.launched("bfloat16", 80, 32))
    names = ("paged_varlen_v1", "paged_varlen", "paged_varlen_split", "merge_splits")
    assert set(texts) == {f"{name}-bfloat16-80-32" for name in names}
    for name in names:
        text = texts[f"{name}-bfloat16-80-32"]
        assert kernel_text(name)["source"] in text and kernel_text(name).get("header", "") in text
        assert re.search(r"\[\[host_name\(.*<bfloat16_t, 80", text), text[-300:]


def test_the_text_is_mlx_s_own(tmp_path):
    """MLX prints the text that it generates while a function is exported, on machines without Metal too."""
    (_, ours), *_ = [row for row in dump_metal_sources.launched("float16", 64, 16) if row[0].startswith("merge_splits")]
    kernel = mx.fast.metal_kernel(name="merge_splits", **kernel_text("merge_splits"))

    def launch(*inputs):
        template = [("T", mx.float16), ("HEAD_DIM", 64)]
        return kernel(
            inputs=inputs,
            output_shapes=[(9, 8, 64)],
            output_dtypes=[mx.float16],
            grid=(256, 9, 1),
            threadgroup=(32, 1, 1),
            template=template,
            verbose=True,
            stream=mx.gpu,
        )

    arrays = mx.zeros((18, 8, 64)), mx.zeros((18, 8, 2)), mx.zeros((9, 3), mx.int32)
    if mx.metal.is_available():
        pytest.skip("compared with Apple's compiler instead, by the workflow")
    printed = _printed(lambda: mx.export_function(str(tmp_path / "f.mlxfn"), launch, *arrays))
    theirs = printed.split("```\n")[1]
    assert theirs.replace("custom_kernel_", "").split() == ours.replace("custom_kernel_", "").split()


def _printed(work):
    """The text that C++ writes to the standard output of this process."""
    import os
    import sys
    import tempfile

    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            work()
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return file.read().decode()


def test_the_preamble_is_the_text_around_its_mark(tmp_path):
    library = tmp_path / "libmlx.dylib"
    library.write_bytes(b"\xcf\xfa\0\0before\0\n// MLX\nstruct WorkPerThread {};\nint f(int x);\n\0after\0")
    head = dump_metal_sources.preamble(library)
    assert head == "\n// MLX\nstruct WorkPerThread {};\nint f(int x);\n"
    assert dump_metal_sources.names_in_common(head, "METAL_FUNC float f(float x) {\n}\nstruct g {\n") == {"f"}
    assert dump_metal_sources.names_in_common(head, kernel_text("paged_varlen")["header"]) == set()
    library.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="contains 'struct WorkPerThread' 0 times, expected once"):
        dump_metal_sources.preamble(library)


PREAMBLE = """
#line 1 "mlx/backend/metal/kernels/bf16.h"
#include <metal_stdlib>
using namespace metal;
typedef bfloat bfloat16_t;
#line 1 "mlx/backend/metal/kernels/bf16_math.h"
inline bfloat abs(bfloat x) { return __metal_abs(x); }
#line 1 "mlx/backend/metal/kernels/complex.h"
struct complex64_t { complex64_t(float re, float im) thread; };
#line 1 "mlx/backend/metal/kernels/utils.h"
typedef half float16_t;
inline complex64_t one() { return complex64_t(1.0f, 0.0f); }
"""


def test_a_dumped_source_is_compiled_behind_the_preamble():
    """Errors of the preamble's and of the kernel's text are found."""
    skip_without_compiler()
    text = dict(dump_metal_sources.launched("bfloat16", 64, 16))["paged_varlen-bfloat16-64-16"]
    assert dump_metal_sources.compile_error(PREAMBLE + text) == ""
    broken = text.replace("row_state.total == 0.0f", "row_state.totl == 0.0f")
    assert broken != text and "no member named 'totl'" in dump_metal_sources.compile_error(PREAMBLE + broken)
    clash = PREAMBLE + "enum WorkItemColumn { OTHER };\n"
    assert "redefinition of 'WorkItemColumn'" in dump_metal_sources.compile_error(clash + text)


def test_a_machine_without_the_library_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["dump_metal_sources.py", str(tmp_path)])
    monkeypatch.setattr(dump_metal_sources, "installed_library", lambda: None)
    with contextlib.redirect_stdout(io.StringIO()):
        assert dump_metal_sources.main() == 2
    assert "give --library, from an unpacked mlx-metal wheel" in capsys.readouterr().err
