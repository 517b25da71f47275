"""Turns an uploaded file into shards on the work queue."""
