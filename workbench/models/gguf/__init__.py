"""GGUF files: read them, and build mlx-lm models and tokenizers from them."""
