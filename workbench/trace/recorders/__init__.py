"""Recorders for other engines: they write the same traces as Workbench's engine, without getting in the other's way.

The engine's process does as little as possible: it packs the decisions of a step into a message (`messages`) and writes
it to a pipe (`writer_process`). A second process reads the pipe (`__main__`), makes the records of a trace from the
messages (`assembler`) and manages the files (`trace_files`). So a step costs the engine a few microseconds, problems
with the disk cannot reach it, and the files are closed properly even if the engine is killed.
"""
