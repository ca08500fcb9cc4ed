"""The difference between two schedulers: the same workloads through both, and the first step that differs."""
