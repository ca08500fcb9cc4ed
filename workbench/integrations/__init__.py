"""Recorders for other engines: they write the same traces as Workbench's engine."""
