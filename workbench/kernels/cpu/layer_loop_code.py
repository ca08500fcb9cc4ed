"""`workbench.kernels.cpu.layer_loop`, compiled."""

from __future__ import annotations

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic, register_jitable

from workbench.kernels.cpu.attention.kernel_code import call_work_list
from workbench.kernels.cpu.attention.layout import Scoring
from workbench.kernels.cpu.attention.simd import (
    LANES,
    exp,
    has_scales,
    jit,
    larger,
    largest_of,
    load,
    put,
    put_scale,
    splat,
    store,
    tanh,
    total_of,
)
from workbench.kernels.cpu.barrier import wait_for_all
from workbench.kernels.cpu.formats import TILE
from workbench.kernels.cpu.inputs_code import prepare_rows
from workbench.kernels.cpu.kernels import ROWS
from workbench.kernels.cpu.kernels_code import call_kernel
from workbench.kernels.cpu.layer_loop import (
    NUM_FACTORED,
    NUM_PARTS,
    SILU,
    FactorField,
    Field,
    ProductField,
    input_sizes,
)
from workbench.kernels.cpu.threads import share

_ZERO, _ONE, _HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
_GELU_SCALE, _GELU_CUBE = np.float32(0.7978845608028654), np.float32(0.044715)
_LARGEST_CODE, _INFINITY = np.float32(127.0), np.float32(np.inf)

register_jitable(input_sizes)


@intrinsic
def _pointer(typing_context, address, like):
    """A pointer from an address to elements of the type of an array."""

    def codegen(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), codegen


@jit
def _normalise(x, numbers, weight, size, epsilon, out):
    """RMS norm of ``size`` elements of flat arrays."""
    total, rest = splat(_ZERO), _ZERO
    whole = size - size % LANES
    for at in range(0, whole, LANES):
        part = load(x, at)
        total = total + part * part
    for at in range(whole, size):
        rest += x[at] * x[at]
    factor = _ONE / np.sqrt((total_of(total) + rest) / np.float32(size) + epsilon)
    for at in range(0, whole, LANES):
        store(out, at, load(x, at) * splat(factor) * load(numbers, weight + at))
    for at in range(whole, size):
        out[at] = x[at] * factor * numbers[weight + at]


# Loops, because numba compiles half as much again for `x += y` and `x[row] = y`: the text of an error about shapes.


@jit
def _add_to(x, y):
    """Add one flat array to another."""
    for at in range(x.size):
        x[at] += y[at]


@jit
def _copy_to(x, y):
    """Copy the first elements of one flat array to another."""
    for at in range(x.size):
        x[at] = y[at]


@jit
def _filled(size, value):
    """A flat array of one value, float32."""
    made = np.empty(size, np.float32)
    for at in range(size):
        made[at] = value
    return made


@jit
def _add_output(residual, out, numbers, weight, epsilon, normed):
    """Add a sublayer's output to the residual, after its norm if it has one."""
    for row in range(out.shape[0]):
        if weight < 0:
            _add_to(residual[row], out[row])
        else:
            _normalise(out[row], numbers, weight, normed.size, epsilon, normed)
            _add_to(residual[row], normed)


_share = jit(share)


@jit
def _prepare(model, first, last, x, start, num_rows, buffers):
    """Prepare the rows from ``start`` on, ``x``, as input of some products, whose inputs lie one after another."""
    stop, at, sums_at = start + x.shape[0], 0, 0
    for index in range(first, last):
        product = model.products[index]
        size, sums_size = input_sizes(product)
        rows = buffers.prepared[at + start * size : at + stop * size].reshape(stop - start, size)
        sums = buffers.sums[sums_at + start * sums_size : sums_at + stop * sums_size].reshape(stop - start, sums_size)
        codes, middle, group = product[ProductField.CODES], product[ProductField.MIDDLE], product[ProductField.GROUP]
        prepare_rows(x, product[ProductField.NUM_COLUMNS], codes, middle, model.factors[index], group, rows, sums)
        at, sums_at = at + num_rows * size, sums_at + num_rows * sums_size


@jit
def _lower(batch, index, product, row, x, lowered):
    """Multiply a row of inputs of a product with the first matrices of its adapter."""
    adapter, done = batch.row_adapters[row], 0
    if adapter < 0:
        return
    for part in range(NUM_PARTS):
        fields = batch.adapters[adapter, index, product, part]
        rank, size = fields[FactorField.RANK], fields[FactorField.NUM_COLUMNS]
        matrix = numba.carray(_pointer(fields[FactorField.FIRST], x), rank * size)
        whole = size - size % LANES
        for number in range(rank):
            total, rest, first = splat(_ZERO), _ZERO, number * size
            for at in range(0, whole, LANES):
                total = total + load(x, at) * load(matrix, first + at)
            for at in range(whole, size):
                rest += x[at] * matrix[first + at]
            lowered[done + number] = total_of(total) + rest
        done += rank


@jit
def _lower_rows(batch, index, product, first_row, x, lowered):
    """Likewise for rows from ``first_row`` of the batch on, if any row has an adapter."""
    if batch.row_adapters.size:
        for row in range(x.shape[0]):
            _lower(batch, index, product, first_row + row, x[row], lowered[row])


@jit
def _add_adapters(batch, index, product, first_row, lowered, y):
    """Add what adapters add to the outputs of rows, of inputs that have been lowered."""
    if not batch.row_adapters.size:
        return
    for row in range(y.shape[0]):
        adapter, done, out = batch.row_adapters[first_row + row], 0, y[row]
        if adapter < 0:
            continue
        for part in range(NUM_PARTS):
            fields = batch.adapters[adapter, index, product, part]
            rank, size, first = (
                fields[FactorField.RANK],
                fields[FactorField.NUM_OUTPUTS],
                fields[FactorField.FIRST_OUTPUT],
            )
            matrix = numba.carray(_pointer(fields[FactorField.SECOND], out), rank * size)
            whole = size - size % LANES
            for at in range(0, whole, LANES):
                total = load(out, first + at)
                for number in range(rank):
                    total = total + splat(lowered[row, done + number]) * load(matrix, number * size + at)
                store(out, first + at, total)
            for at in range(whole, size):
                for number in range(rank):
                    out[first + at] += lowered[row, done + number] * matrix[number * size + at]
            done += rank


@jit
def _largest_rank(adapters):
    """The largest sum of the ranks of a product's parts."""
    largest = 0
    for adapter in range(adapters.shape[0]):
        for index in range(adapters.shape[1]):
            for product in range(NUM_FACTORED):
                total = 0
                for part in range(NUM_PARTS):
                    total += adapters[adapter, index, product, part, FactorField.RANK]
                largest = max(largest, total)
    return largest


@jit
def _prepare_normed(model, first, last, x, weight, start, num_rows, normed, buffers):
    """Prepare rows after their norm; ``normed`` is memory for one of them."""
    for row in range(x.shape[0]):
        _normalise(x[row], model.numbers, weight, normed.size, model.epsilon, normed)
        _prepare(model, first, last, normed.reshape(1, -1), start + row, num_rows, buffers)


@jit
def _lower_normed(model, batch, index, product, first_row, x, weight, normed, lowered):
    """Lower rows after their norm, if any row has an adapter; ``normed`` is memory for one of them."""
    if batch.row_adapters.size:
        for row in range(x.shape[0]):
            _normalise(x[row], model.numbers, weight, normed.size, model.epsilon, normed)
            _lower(batch, index, product, first_row + row, normed, lowered[row])


@jit
def _multiply(model, first, last, y, buffers, thread, num_threads):
    """This thread's outputs of some products, of the inputs that have been prepared for the rows of ``y``."""
    num_rows, inputs, sums = y.shape[0], np.intp(buffers.prepared.ctypes.data), np.intp(buffers.sums.ctypes.data)
    for index in range(first, last):
        product = model.products[index]
        size, sums_size = input_sizes(product)
        start, stop = _share(product[ProductField.NUM_TILES], thread, num_threads)
        outputs = (np.intp(y.ctypes.data + 4 * product[ProductField.FIRST_OUTPUT]), y.shape[1])
        sizes = (num_rows, product[ProductField.NUM_UNITS], product[ProductField.NUM_OUTPUTS], start, stop)
        call_kernel(
            product[ProductField.KERNEL],
            (product[ProductField.WEIGHTS], inputs, size, sums, sums_size, *outputs, *sizes),
        )
        inputs, sums = inputs + 4 * num_rows * size, sums + 4 * num_rows * sums_size
        if product[ProductField.BIAS] >= 0:
            for row in range(num_rows):
                for output in range(start * TILE, min(stop * TILE, product[ProductField.NUM_OUTPUTS])):
                    y[row, product[ProductField.FIRST_OUTPUT] + output] += model.numbers[
                        product[ProductField.BIAS] + output
                    ]


@jit
def _rotate(row, at, cosines, sines):
    """RoPE on the halves of a head that begins at ``at``."""
    half = cosines.size
    for index in range(half):
        a, b = row[at + index], row[at + half + index]
        row[at + index] = a * cosines[index] - b * sines[index]
        row[at + half + index] = b * cosines[index] + a * sines[index]


@jit
def _place_row(model, layer, row, slot, cosines, sines, shapes, k_cache, v_cache):
    """Normalise and rotate a token's queries and keys, and write its keys and values to the pool."""
    head_dim, num_heads, num_kv_heads = shapes.head_dim, shapes.num_heads, shapes.num_kv_heads
    for head in range(num_heads + num_kv_heads):
        weight = layer[Field.Q_NORM] if head < num_heads else layer[Field.K_NORM]
        part = row[head * head_dim : (head + 1) * head_dim]
        if weight >= 0:
            _normalise(part, model.numbers, weight, head_dim, model.epsilon, part)
        _rotate(part, 0, cosines, sines)
    for head in range(num_kv_heads):
        place, keys_at = (slot * num_kv_heads + head) * shapes.stored_dim, (num_heads + head) * head_dim
        _store_row(k_cache, place, row, keys_at, head_dim)
        _store_row(v_cache, place, row, keys_at + num_kv_heads * head_dim, head_dim)


@jit
def _store_row(cache, at, row, row_at, size):
    """Write a head's key or value to the pool, see `workbench.kernels.attention.stored`."""
    whole, factor = size - size % LANES, _ONE
    if has_scales(cache):
        largest, finite = splat(_ZERO), splat(_ZERO)
        for index in range(0, whole, LANES):
            part = load(row, row_at + index)
            largest = larger(larger(largest, part), splat(_ZERO) - part)
            finite = finite + part * splat(_ZERO)
        top = largest_of(largest) + total_of(finite)  # NaN if a number is not finite
        for index in range(whole, size):
            top = max(top, abs(row[row_at + index])) + row[row_at + index] * _ZERO
        put_scale(cache, at + size, top / _LARGEST_CODE)
        factor = _ZERO if top == _ZERO else _LARGEST_CODE / top
    for index in range(0, whole, LANES):
        store(cache, at + index, load(row, row_at + index) * splat(factor))
    for index in range(whole, size):
        put(cache, at + index, row[row_at + index] * factor)


@jit
def _activated(gate, up, activation):
    if activation == SILU:
        return gate / (splat(_ONE) + exp(splat(_ZERO) - gate)) * up
    inner = splat(_GELU_SCALE) * (gate + splat(_GELU_CUBE) * gate * gate * gate)
    return splat(_HALF) * gate * (splat(_ONE) + tanh(inner)) * up


@jit
def _activate(gate_up, hidden, activation):
    """``gate = activation(gate) * up`` of some rows."""
    rest = _filled(2 * LANES, _ZERO)
    for row in range(gate_up.shape[0]):
        source = gate_up[row]
        whole = hidden - hidden % LANES
        for at in range(0, whole, LANES):
            store(source, at, _activated(load(source, at), load(source, hidden + at), activation))
        if whole < hidden:
            for lane in range(hidden - whole):
                rest[lane], rest[LANES + lane] = source[whole + lane], source[hidden + whole + lane]
            store(rest, 0, _activated(load(rest, 0), load(rest, LANES), activation))
            for lane in range(hidden - whole):
                source[whole + lane] = rest[lane]


def run_layers(model, batch, shapes, pool_size, like, buffers, scratch, thread, num_threads, barrier):
    """Run the model on a packed batch; `Buffers.logits` holds the logits afterwards.

    Args:
        model: The model.
        batch: The batch.
        shapes: Sizes of attention.
        pool_size: Elements of a layer's keys in the pool.
        like: An array of the type of the pool's arrays.
        buffers: Shared memory of the threads.
        scratch: Working memory of attention, of this thread alone.
        thread: Number of this thread.
        num_threads: Number of threads.
        barrier: See `workbench.kernels.cpu.barrier`.
    """
    residual, epsilon, numbers = batch.embedded, model.epsilon, model.numbers
    num_rows, hidden_size = residual.shape
    normed = np.empty(hidden_size, np.float32)
    lowered = np.empty((min(num_rows, ROWS), max(1, _largest_rank(batch.adapters))), np.float32)
    first_maximum, first_total = _filled(shapes.num_heads, -_INFINITY), _filled(shapes.num_heads, _ZERO)

    for index in range(model.layers.shape[0]):
        layer = model.layers[index]
        k_cache = numba.carray(_pointer(layer[Field.K_CACHE], like), pool_size)
        v_cache = numba.carray(_pointer(layer[Field.V_CACHE], like), pool_size)
        for row in range(0, num_rows, ROWS):
            count = min(num_rows - row, ROWS)
            start, stop = _share(count, thread, num_threads)
            qkv, attended = buffers.qkv[:count], buffers.attended[row : row + count]
            own, norm = residual[row + start : row + stop], layer[Field.INPUT_NORM]
            _prepare_normed(model, layer[Field.QKV], layer[Field.QKV + 1], own, norm, start, count, normed, buffers)
            _lower_normed(model, batch, index, Field.QKV // 2, row + start, own, norm, normed, lowered)
            wait_for_all(barrier, num_threads)
            _multiply(model, layer[Field.QKV], layer[Field.QKV + 1], qkv, buffers, thread, num_threads)
            wait_for_all(barrier, num_threads)
            _add_adapters(batch, index, Field.QKV // 2, row + start, lowered, qkv[start:stop])
            for place in range(start, stop):
                position, rope = batch.positions[row + place], layer[Field.ROPE]
                cosines, sines = batch.cosines[rope, position], batch.sines[rope, position]
                slot = batch.slots[layer[Field.BLOCK_TABLE], row + place]
                _place_row(model, layer, qkv[place], slot, cosines, sines, shapes, k_cache, v_cache)
                _copy_to(attended[place], qkv[place])
        wait_for_all(barrier, num_threads)
        scoring = Scoring(model.scales[index], _ZERO, layer[Field.LEFT], first_maximum, first_total)
        queries = buffers.attended.reshape(-1)
        items = batch.work[batch.work_ranges[index, 0] : batch.work_ranges[index, 1]]
        table = batch.block_tables[layer[Field.BLOCK_TABLE]]
        memory = (queries, k_cache, v_cache, queries, items, table)
        call_work_list(model.attention, (*memory, shapes, scoring, scratch, thread, num_threads))
        wait_for_all(barrier, num_threads)
        for row in range(0, num_rows, ROWS):
            count = min(num_rows - row, ROWS)
            start, stop = _share(count, thread, num_threads)
            own, out = residual[row + start : row + stop], buffers.out[:count]
            attended = buffers.attended[row + start : row + stop]
            _prepare(model, layer[Field.OUT], layer[Field.OUT + 1], attended, start, count, buffers)
            _lower_rows(batch, index, Field.OUT // 2, row + start, attended, lowered)
            wait_for_all(barrier, num_threads)
            _multiply(model, layer[Field.OUT], layer[Field.OUT + 1], out, buffers, thread, num_threads)
            wait_for_all(barrier, num_threads)
            _add_adapters(batch, index, Field.OUT // 2, row + start, lowered, out[start:stop])
            _add_output(own, out[start:stop], numbers, layer[Field.ATTENTION_NORM], epsilon, normed)
        for row in range(0, num_rows, ROWS):
            count = min(num_rows - row, ROWS)
            start, stop = _share(count, thread, num_threads)
            own, out, gate_up = residual[row + start : row + stop], buffers.out[:count], buffers.gate_up[:count]
            norm = layer[Field.MLP_NORM]
            _prepare_normed(
                model, layer[Field.GATE_UP], layer[Field.GATE_UP + 1], own, norm, start, count, normed, buffers
            )
            _lower_normed(model, batch, index, Field.GATE_UP // 2, row + start, own, norm, normed, lowered)
            wait_for_all(barrier, num_threads)
            _multiply(model, layer[Field.GATE_UP], layer[Field.GATE_UP + 1], gate_up, buffers, thread, num_threads)
            wait_for_all(barrier, num_threads)
            _add_adapters(batch, index, Field.GATE_UP // 2, row + start, lowered, gate_up[start:stop])
            _activate(gate_up[start:stop], model.hidden, model.activation)
            _prepare(model, layer[Field.DOWN], layer[Field.DOWN + 1], gate_up[start:stop], start, count, buffers)
            _lower_rows(batch, index, Field.DOWN // 2, row + start, gate_up[start:stop], lowered)
            wait_for_all(barrier, num_threads)
            _multiply(model, layer[Field.DOWN], layer[Field.DOWN + 1], out, buffers, thread, num_threads)
            wait_for_all(barrier, num_threads)
            _add_adapters(batch, index, Field.DOWN // 2, row + start, lowered, out[start:stop])
            _add_output(own, out[start:stop], numbers, layer[Field.DOWN_NORM], epsilon, normed)

    head = model.products.shape[0] - 1
    for first in range(0, batch.rows.size, ROWS):
        wait_for_all(barrier, num_threads)
        logits = buffers.logits[first : first + ROWS]
        start, stop = _share(logits.shape[0], thread, num_threads)
        for index in range(start, stop):
            at = batch.rows[first + index]
            row, norm = residual[at : at + 1], model.final_norm
            _prepare_normed(model, head, head + 1, row, norm, index, logits.shape[0], normed, buffers)
        wait_for_all(barrier, num_threads)
        _multiply(model, head, head + 1, logits, buffers, thread, num_threads)
