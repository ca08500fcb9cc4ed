"""Recorders for other engines: they write the same trace that Workbench's own engine does."""
