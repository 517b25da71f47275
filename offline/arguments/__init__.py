"""Command-line arguments: the parser, types of values, and flags of vLLM that are not ours."""
