"""GGUF files: read, described in transformers' format, and dequantized to safetensors."""
