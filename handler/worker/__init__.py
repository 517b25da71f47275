"""The shard runner: claims shards, feeds the engine, makes rows durable."""
