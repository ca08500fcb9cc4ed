"""An engine that runs a real model, one scheduler step at a time."""
