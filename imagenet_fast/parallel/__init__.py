"""Train a model on many ranks: by a pool, by torch's DDP, or divided into shards and stages."""
