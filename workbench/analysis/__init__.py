"""Answers about a run: why a request was slow, what another setting would change, which setting meets a target."""
