"""Weights that stay packed: matrices, layers that multiply with them, and models that are put together from them."""
