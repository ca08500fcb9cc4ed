"""The tokens that make up a step, chosen by vLLM V1's rules: requests, queues, KV blocks."""
