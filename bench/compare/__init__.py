"""Benchmarks against other engines: vLLM, OpenVINO, transformers."""
