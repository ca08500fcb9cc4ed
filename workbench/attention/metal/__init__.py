"""attention/metal."""
