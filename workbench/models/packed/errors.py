"""The error of a packed matrix whose products are wrong."""

from __future__ import annotations


class WrongProductError(RuntimeError):
    """Products with packed weights are not those with the dequantised weights; the message says by how much."""
