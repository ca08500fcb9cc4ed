"""Simulations: the engine's scheduler under a workload, without a model."""
