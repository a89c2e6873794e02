"""Cases for selective checkpointing: compiled graphs, eager values, and state changes."""
