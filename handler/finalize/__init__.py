"""From sealed shards to output objects and a terminal batch."""
