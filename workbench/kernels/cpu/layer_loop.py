"""All layers of a llama-like model in compiled code, over the paged pool, with nothing of MLX in between.

The model is data: a row of numbers per layer (`Field`), a table of products, and one array with the weights of norms
and biases. Several threads may run `run_layers` on the same arguments. Each takes its share of outputs, rows and work
items, and all wait for each other where one needs what another has written. The residual and the inputs of products are
computed once, row by row. A number does not depend on the thread that computes it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from workbench.kernels.cpu.attention.compiled import EntryPoint
from workbench.kernels.cpu.formats import UNIT
from workbench.kernels.cpu.inputs import row_size


class Field(IntEnum):
    """Columns of the table of layers; a product range is two columns, a weight is an index into `numbers` or -1."""

    QKV = 0
    OUT = 2
    GATE_UP = 4
    DOWN = 6
    INPUT_NORM = 8
    ATTENTION_NORM = 9
    MLP_NORM = 10
    DOWN_NORM = 11
    Q_NORM = 12
    K_NORM = 13
    ROPE = 14
    K_CACHE = 15
    V_CACHE = 16
    LEFT = 17
    BLOCK_TABLE = 18
    NUM_FIELDS = 19


class ProductField(IntEnum):
    """Columns of the table of products."""

    KERNEL = 0
    WEIGHTS = 1
    NUM_COLUMNS = 2
    NUM_UNITS = 3
    GROUP = 4
    NUM_OUTPUTS = 5
    FIRST_OUTPUT = 6
    NUM_TILES = 7
    BIAS = 8
    CODES = 9
    MIDDLE = 10
    NUM_FIELDS = 11


class FactorField(IntEnum):
    """Columns of the table of adapters: addresses of both matrices, their rank, inputs, and outputs."""

    FIRST = 0
    SECOND = 1
    RANK = 2
    NUM_COLUMNS = 3
    FIRST_OUTPUT = 4
    NUM_OUTPUTS = 5


NUM_FACTORED, NUM_PARTS = 4, 3
"""Products of a layer that adapters change, in the order of `Field`, and linear layers that one of these may join."""

SILU, GELU = 0, 1
"""Activations of the gate: x * sigmoid(x), and GELU by its approximation with tanh."""


class Model(NamedTuple):
    """A model as data.

    Attributes:
        layers: int64 [num_layers, Field.NUM_FIELDS].
        products: int64 [num_products, ProductField.NUM_FIELDS]; the last of them is the head.
        factors: Factors of each product's format, float32 [num_products, 32].
        numbers: Weights of norms and biases, float32.
        scales: Softmax scale of each layer in units of log2, float32 [num_layers].
        final_norm: Index of the final norm's weights in ``numbers``.
        epsilon: Of every norm.
        activation: SILU or GELU.
        hidden: Width of the gate and of the up projection.
        attention: `work_list_address`.
    """

    layers: np.ndarray
    products: np.ndarray
    factors: np.ndarray
    numbers: np.ndarray
    scales: np.ndarray
    final_norm: int
    epsilon: np.float32
    activation: int
    hidden: int
    attention: int


class Batch(NamedTuple):
    """A packed batch.

    Attributes:
        embedded: Embeddings, float32 [T, hidden_size]; the residual takes their place.
        positions: int32 [T].
        slots: int64 [num_cache_groups, T].
        rows: Rows whose logits are needed, int32.
        block_tables: int32 [num_cache_groups, num_seqs, max_blocks].
        work: Work lists one after another, int32 [num_items, 7].
        work_ranges: First item and the one to stop before of each layer, int64 [num_layers, 2].
        cosines: float32 [num_ropes, positions, head_dim / 2].
        sines: Likewise.
        adapters: int64 [num_adapters, num_layers, NUM_FACTORED, NUM_PARTS, fields of FactorField].
        row_adapters: Each row's index into ``adapters``, -1 for none, int64 [T]; [0] if no row has one.
    """

    embedded: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    block_tables: np.ndarray
    work: np.ndarray
    work_ranges: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray
    adapters: np.ndarray
    row_adapters: np.ndarray


class Buffers(NamedTuple):
    """Arrays that threads write for each other, float32.

    ``qkv``, ``out`` and ``gate_up`` may share their memory, and ``gate_up`` that of ``attended``, too.

    Attributes:
        qkv: Queries, keys and values, [min(T, ROWS), ...].
        attended: Output of attention, [T, ...].
        out: Output of a projection to the hidden size, [min(T, ROWS), ...].
        gate_up: Gate and up projection; then the input of the down projection in place of the gate:
            [min(T, ROWS), 2 * hidden].
        prepared: Inputs of products as their kernels read them, flat; see `_prepare`.
        sums: Sums of their groups, flat.
        logits: The result, [num_rows, vocab_size].
    """

    qkv: np.ndarray
    attended: np.ndarray
    out: np.ndarray
    gate_up: np.ndarray
    prepared: np.ndarray
    sums: np.ndarray
    logits: np.ndarray


def input_sizes(product):
    """Elements of a row of a product's prepared input, and of the sums of its groups."""
    return row_size(product[ProductField.NUM_UNITS], product[ProductField.CODES]), product[ProductField.NUM_UNITS] * (
        UNIT // product[ProductField.GROUP]
    )


def make_barrier() -> np.ndarray:
    """A barrier, see `workbench.kernels.cpu.barrier`: int64 [32]."""
    return np.zeros(32, np.int64)


run_layers = EntryPoint("workbench.kernels.cpu.layer_loop_code:run_layers")
"""Runs the model on a packed batch; see `workbench.kernels.cpu.layer_loop_code` for the arguments."""
