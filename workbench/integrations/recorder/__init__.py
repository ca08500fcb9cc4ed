"""Records another engine's scheduler without getting in its way.

The engine's process does the least it can: it packs what a step decided into a message (`messages`) and puts it into
a pipe (`writer_process`). A process of its own reads the pipe (`__main__`), makes the records of a trace from the
messages (`assembler`) and keeps the files (`trace_files`). So the cost to the engine is a few microseconds a step,
whatever happens to the disk cannot reach it, and when the engine is killed the files are still closed in order.
"""
