"""The cost of a step: models of its duration, fitted to recorded runs."""
