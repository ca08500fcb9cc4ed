"""vLLM in one process, scheduler and worker, recorded and profiled: python profiled_engine.py MODEL PROFILES."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, profiles = sys.argv[1:]
    engine = LLM(
        model,
        load_format="dummy",
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        distributed_executor_backend="uni",
        scheduler_cls="workbench.vllm.RecordingScheduler",
        profiler_config={"profiler": "torch", "torch_profiler_dir": profiles, "torch_profiler_with_stack": False},
    )

    def complete(first: int) -> None:
        prompts = [{"prompt_token_ids": [3 + (first + 7 * token) % 900 for token in range(100)]} for _ in range(3)]
        engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)

    complete(0)
    engine.start_profile()
    complete(1)
    engine.stop_profile()
    complete(2)
    engine.llm_engine.engine_core.shutdown()
