"""Parameters of which this process has one shard of tensor parallelism: found, paged as ordinary ones, and shown."""
