"""Compare ways to save memory on whole training steps; see `__main__`."""
