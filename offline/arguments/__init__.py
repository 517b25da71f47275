"""Command-line arguments: parser, argument types, and vLLM flags that Tidemill lacks."""
