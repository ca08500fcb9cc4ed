"""Computation: paged varlen attention, machine code for a CPU, and Metal kernels run on a CPU with checks."""
