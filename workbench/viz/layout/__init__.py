"""Layout: pure functions from a trace and a step to numbers and rectangles, in the units of the trace.

Static pictures use the functions of ``timeline``, ``pool`` and ``packed_batch``. Live views get the same numbers as
columns (``columns``, ``packet``). A renderer only converts units into pixels.
"""
