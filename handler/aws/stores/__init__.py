"""The items of the one table, a store for each kind of thing: batches and shards, files, counts."""
