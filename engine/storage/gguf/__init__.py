"""GGUF files: reading, description in transformers' format, dequantization to safetensors."""
