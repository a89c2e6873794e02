"""Cases of the area ckpt-wrap."""
