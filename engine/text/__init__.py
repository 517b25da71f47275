"""Text and tokens: tokenizer, incremental detokenization, chat template, stop strings."""
