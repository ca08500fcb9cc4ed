"""One model over several ranks: rank 0's runner, and what the other ranks do meanwhile."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from workbench.distributed.link import Kind, Link
from workbench.distributed.wire import decode, encode
from workbench.engine.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch
from workbench.models.load import LoadedModel

READY_SECONDS = 600
"""From the first rank's request for runners to the last rank's answer, which includes what is left of its loading."""


class SharedRunner(ModelRunner):
    """A runner in whose forward passes other ranks take part: one that fails ends the job.

    They are in the middle of the same pass, and waiting in a collective they cannot be called back.

    Args:
        model: This rank's model, or its part of one.
        config: Of the engine.
        link: To the other ranks.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, link: Link) -> None:
        self._link = link
        self._num_passes = 0
        super().__init__(model, config)

    def forward(self, packed: PackedBatch) -> mx.array:
        """Run the model once, see `ModelRunner.forward`; does not return when a rank is lost."""
        self._link.doing = f"in forward pass {self._num_passes}"
        try:
            logits = super().forward(packed)
        except BaseException as problem:  # a pass that is abandoned half way too
            self._link.fail(f"{type(problem).__name__}: {problem}")
        self._link.doing = f"after forward pass {self._num_passes}"
        self._num_passes += 1
        return logits


class LeadingRunner(SharedRunner):
    """The runner of rank 0: it tells the other ranks to do what it does.

    Every rank finds out by its own preflight how its part of the model is served, at the same time as the others, for
    a sharded model runs on all ranks or not at all.

    Args:
        model: This rank's part of the model.
        config: Of the engine; the other ranks make their pools by it.
        link: To the other ranks, each of which is in `follow`.

    Raises:
        ValueError: The ranks do not hold the same model, or do not serve it alike.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, link: Link) -> None:
        link.doing = "making the runners"
        link.broadcast(Kind.OPEN, json.dumps(config.to_dict()).encode())
        # Ranks that come to different findings run different passes, and then wait for each other for ever.
        late = f"the ranks do not serve the model alike, or one takes more than {READY_SECONDS} s to load it"
        too_late = threading.Timer(READY_SECONDS, link.fail, [late])
        too_late.daemon = True
        too_late.start()
        try:
            super().__init__(model, config, link)
            self._check_that_ranks_agree()
        except Exception:
            link.broadcast(Kind.CLOSE)
            raise
        finally:
            too_late.cancel()

    def _check_that_ranks_agree(self) -> None:
        own = _facts(self)
        for _ in range(self._link.size - 1):
            message = self._link.receive()
            theirs = json.loads(message.payload)
            for name, value in own.items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"ranks disagree on {name}: {value!r} on rank 0, {theirs.get(name)!r} on rank {message.rank}; "
                        "start every rank with the same model, packages and options"
                    )

    def forward(self, packed: PackedBatch) -> mx.array:
        """Run the model once on every rank, see `ModelRunner.forward`; does not return when a rank is lost."""
        self._check(packed)
        self._link.broadcast(Kind.STEP, encode(packed))
        return super().forward(packed)

    def close(self) -> None:
        """Leave the model as it was before, on every rank."""
        super().close()
        self._link.broadcast(Kind.CLOSE)

    def describe(self) -> dict[str, Any]:
        """Facts about the model on this rank, and the number of ranks."""
        return {**super().describe(), "tensor_parallel_size": self._link.size}


def follow(link: Link, load: Callable[[], LoadedModel]) -> None:
    """Do what rank 0 says until the job is done; a failure on this rank ends the job, and does not return.

    Args:
        link: To rank 0.
        load: Loads this rank's part of the model.
    """
    try:
        model, runner = load(), None
        while (message := link.receive()).kind is not Kind.STOP:
            if message.kind is Kind.OPEN:
                runner = ModelRunner(model, EngineConfig.from_dict(json.loads(message.payload)))
                link.send(0, Kind.READY, json.dumps(_facts(runner)).encode())
            elif message.kind is Kind.STEP:
                runner.forward(decode(message.payload, runner.kv_cache.num_blocks))
            elif message.kind is Kind.CLOSE:
                runner.close()
    except Exception as problem:
        link.fail(f"{type(problem).__name__}: {problem}")


def _facts(runner: ModelRunner) -> dict[str, Any]:
    """What has to be the same on every rank for their forward passes to be parts of one."""
    model, layers = runner.loaded, runner.preflight.layers
    return {
        "model": [model.name, model.architecture, model.num_parameters, model.dtype, model.quantized],
        "weights that every rank holds": _fingerprint(model),
        "attention": [runner.mode, runner.preflight.num_heads, runner.preflight.final_norm],
        "KV heads": [layer.num_kv_heads for layer in layers],
        "versions": {package: version(package) for package in ("inference-workbench", "mlx", "mlx-lm")},
    }


def _fingerprint(model: LoadedModel) -> str:
    """A digest of the small weights that are not split: norms, above all."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(tree_flatten(model.model.parameters())):
        if weight.ndim == 1 and "norm" in name:
            digest.update(name.encode() + np.array(weight.astype(mx.float32)).tobytes())
    return digest.hexdigest()
