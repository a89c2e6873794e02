"""Cases for selective checkpointing: compiled graphs, eager correctness, our own promises."""
