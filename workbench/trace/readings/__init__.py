"""Derived from the records of a run alone: latencies, metrics, the KV pool's state, sentences, comparisons."""
