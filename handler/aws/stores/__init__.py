"""Items of the single table, with a store per kind: batches and shards, files, counts."""
