"""The shard runner: claims shards, feeds the engine, stores rows durably."""
