"""Cases of the area ckpt-wrap, one file per topic."""
