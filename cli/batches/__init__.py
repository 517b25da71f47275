"""Batches: checking, submitting, following and fetching them by API or bucket."""
