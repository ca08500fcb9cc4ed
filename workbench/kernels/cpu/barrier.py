"""The place where threads of compiled code wait for each other.

The threads of a pool sleep between two calls (`workbench.kernels.cpu.threads`). Inside a call they wait for each other
at barriers that last microseconds, so they spin there, and give way to other processes when it takes longer.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workbench.kernels.cpu.attention.simd import jit

_SPINS = 4096  # looks at a barrier before the processor is offered to others

_COUNT, _TURN = 0, 16  # elements of a barrier: arrivals, and turns of the barrier; on different cache lines


@intrinsic
def _add_atomically(typing_context, array, index, value):
    """Add to an element; return what it was before."""

    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [values[1]]), values[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def _read_atomically(typing_context, array, index):
    """Read an element that another thread may change."""

    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.load_atomic(builder.gep(data, [values[1]]), "seq_cst", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def _store_atomically(typing_context, array, index, value):
    """Store an element that another thread may read."""

    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        builder.store_atomic(values[2], builder.gep(data, [values[1]]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic
def _give_way(typing_context):
    """Let other threads of the machine run."""

    def codegen(context, builder, signature, values):
        function_type = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@jit
def wait_for_all(barrier, num_threads):
    """Wait until every thread has come to this place."""
    if num_threads == 1:
        return
    turn = _read_atomically(barrier, _TURN)
    if _add_atomically(barrier, _COUNT, 1) == num_threads - 1:
        _store_atomically(barrier, _COUNT, 0)
        _store_atomically(barrier, _TURN, turn + 1)
        return
    spins = 0
    while _read_atomically(barrier, _TURN) == turn:
        spins += 1
        if spins > _SPINS:
            _give_way()
