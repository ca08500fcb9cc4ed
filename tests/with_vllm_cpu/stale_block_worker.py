"""vLLM's CPU worker with a fault: before one step, a KV block gets what another block has, in every layer."""

import os

from vllm.v1.worker.cpu_worker import CPUWorker


class StaleBlockWorker(CPUWorker):
    """Overwrites a block before the step that WORKBENCH_STALE_STEP names."""

    num_steps = 0

    def execute_model(self, scheduler_output, *args, **kwargs):
        """Run the step, after the fault if it is the one."""
        if scheduler_output.num_scheduled_tokens:
            if self.num_steps == int(os.environ["WORKBENCH_STALE_STEP"]):
                self.overwrite(*map(int, os.environ["WORKBENCH_STALE_BLOCKS"].split(",")))
            self.num_steps += 1
        return super().execute_model(scheduler_output, *args, **kwargs)

    def overwrite(self, block, other):
        """Copy a block over another one; the layout of a cache is told by its one side of as many places as blocks."""
        num_blocks = self.cache_config.num_gpu_blocks
        for cache in self.model_runner.kv_caches:
            (side,) = (index for index, size in enumerate(cache.shape) if size == num_blocks)
            cache.select(side, block).copy_(cache.select(side, other))
