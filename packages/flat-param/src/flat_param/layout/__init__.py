"""Plans of flat buffers and their shards, and checks of arguments; allocates nothing."""
