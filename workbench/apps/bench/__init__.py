"""A model served under the load of a benchmark: the requests, the run, and the report of ``vllm bench serve``."""
