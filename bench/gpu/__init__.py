"""Benchmarks for a machine with a GPU, and the roofline that predicts them."""
