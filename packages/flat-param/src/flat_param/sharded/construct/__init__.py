"""`fully_shard`, and what it does to a module before it is sharded."""
