"""Benchmarks of real work: a real model, English texts, and answers that end by themselves."""
