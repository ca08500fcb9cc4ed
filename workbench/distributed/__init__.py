"""Engines on more than one machine: the ranks of a job that ``mlx.launch`` started, over ``mlx.distributed``.

Two arrangements, which share nothing but the group of ranks:

- One model over all ranks (`job`): rank 0 schedules, samples and records; `wire` packs what it chose, `link` carries
  it, and every rank runs the same forward pass on its own heads and its own KV pool (`ranks`).
- One engine per rank, in step with the others (`lockstep`).
"""
