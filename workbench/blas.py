"""Placeholder until the BLAS preload lands."""


def preload() -> None:
    """Do nothing yet."""


def backend_info() -> str:
    """Say nothing yet."""
    return "reference BLAS"
