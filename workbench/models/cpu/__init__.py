"""Compiled code for a model on this processor: packed weights, products with them, and whole layers."""
