"""Machine code for a CPU: products with packed weights, attention, and whole layers."""
