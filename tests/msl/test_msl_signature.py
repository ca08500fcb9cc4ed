"""The generated kernel text equals MLX's own.

MLX prints the generated text of a verbose kernel, and exporting a function generates it even on a machine without
Metal.
"""

import mlx.core as mx
import pytest

from workbench.kernels.msl.signature import write_kernel

HEADER = "#include <metal_simdgroup>\nstruct nothing {};\n"

CASES = {
    "smallest": {"source": "y[0] = x[0];", "inputs": [(9,)], "output_dtypes": [mx.float32]},
    "attributes": {
        "source": "uint i = thread_position_in_grid.x + simdgroup_index_in_threadgroup; // threads_per_threadgroup\n",
        "inputs": [(9,)],
        "output_dtypes": [mx.float32],
    },
    "every attribute": {
        "source": """dispatch_quadgroups_per_threadgroup dispatch_simdgroups_per_threadgroup
            dispatch_threads_per_threadgroup grid_origin grid_size quadgroup_index_in_threadgroup
            quadgroups_per_threadgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup thread_execution_width
            thread_index_in_quadgroup thread_index_in_simdgroup thread_index_in_threadgroup thread_position_in_grid
            thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid threads_per_grid
            threads_per_simdgroup threads_per_threadgroup""",
        "inputs": [(9,)],
        "output_dtypes": [mx.float32],
    },
    "constant below 8 elements": {"source": "y", "inputs": [(7,), (8,), (2, 3), (2, 4)], "output_dtypes": [mx.int32]},
    "scalar": {"source": "y", "inputs": [(), (1,), ()], "output_dtypes": [mx.int32]},
    "shapes, strides and ndim": {
        "source": "x_shape z_strides w_ndim // x_strides and scalar_shape",
        "inputs": [(3, 4), (5, 5), (2,)],
        "output_dtypes": [mx.float32],
    },
    "shape of a scalar is left out": {"source": "x_shape x_ndim", "inputs": [()], "output_dtypes": [mx.float32]},
    "words in the header do not count": {
        "header": "// x_shape thread_position_in_grid\n",
        "source": "y",
        "inputs": [(9,)],
        "output_dtypes": [mx.float32],
    },
    "template": {
        "source": "T N B",
        "inputs": [(9,)],
        "output_dtypes": [mx.bfloat16],
        "template": [("T", mx.bfloat16), ("N", -3), ("B", True), ("C", False), ("M", 64)],
    },
    "atomic outputs": {
        "source": "thread_index_in_threadgroup",
        "inputs": [(9,)],
        "output_dtypes": [mx.float32, mx.uint32],
        "atomic": True,
    },
    "every dtype": {
        "source": "y",
        "inputs": [(9,)] * 12,
        "input_dtypes": [
            mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.float16,
            mx.bfloat16, mx.float32,
        ],
        "output_dtypes": [mx.bool_, mx.uint64],
    },
}  # fmt: skip


def generated_by_mlx(case, inputs, input_names, output_names, tmp_path, capfd):
    kernel = mx.fast.metal_kernel(
        "golden",
        input_names,
        output_names,
        case["source"],
        case.get("header", HEADER),
        atomic_outputs=case.get("atomic", False),
    )

    def launch(*arrays):
        return kernel(
            inputs=arrays,
            output_shapes=[(4,)] * len(output_names),
            output_dtypes=case["output_dtypes"],
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
            template=case.get("template"),
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(tmp_path / "golden.mlxfn"), launch, *inputs)
    printed = capfd.readouterr().out
    return printed.split("```\n", 1)[1].rsplit("\n```", 1)[0]


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal the kernel would be run, not only generated")
@pytest.mark.parametrize("name", CASES)
def test_text_equals_what_mlx_generates(name, tmp_path, capfd):
    case = CASES[name]
    dtypes = case.get("input_dtypes", [mx.float32] * len(case["inputs"]))
    inputs = [mx.ones(shape, dtype=dtype) for shape, dtype in zip(case["inputs"], dtypes)]
    input_names = ["x", "z", "w", *(f"in{i}" for i in range(12))][: len(inputs)]
    output_names = ["y", "u"][: len(case["output_dtypes"])]
    ours = write_kernel(
        "golden",
        input_names,
        output_names,
        case["source"],
        case.get("header", HEADER),
        inputs,
        case["output_dtypes"],
        case.get("template", []),
        case.get("atomic", False),
    )
    assert ours.text == generated_by_mlx(case, inputs, input_names, output_names, tmp_path, capfd)
