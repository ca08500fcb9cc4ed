"""Layout: pure functions from a trace and a step to numbers and rectangles, in the units of the trace."""
