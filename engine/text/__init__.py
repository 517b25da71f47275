"""Text to tokens and back: tokenizer, chat template, stop strings, defaults of a model."""
