"""For every room: checks of values, the BLAS, threads, the device, the cache folder."""
