"""Engines on more than one machine: the ranks of a job that ``mlx.launch`` started, over ``mlx.distributed``.

Two arrangements share the group of ranks and the link between them:

- One model over all ranks (`job`): rank 0 schedules, samples and records; `wire` encodes each packed batch, `link`
  carries it, and every rank runs the same forward pass on its own heads and its own KV pool (`ranks`).
- One engine per rank, whose steps run together (`lockstep`).
"""
