"""Layout: pure functions from a trace and a step to numbers and rectangles, in the units of the trace.

The static pictures use the functions of ``timeline``, ``pool`` and ``packed_batch``; the live views are
sent the same numbers as columns (``columns``, ``packet``). Only the turning of units into pixels is left to them.
"""
