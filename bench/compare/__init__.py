"""Benchmarks beside other engines: vLLM, OpenVINO, transformers."""
