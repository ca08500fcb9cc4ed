"""The ways through the model, fastest first: compiled, replayed, layer by layer, gathering; and one that stops."""
