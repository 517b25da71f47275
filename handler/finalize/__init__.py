"""Turns sealed shards into output objects and a terminal batch."""
