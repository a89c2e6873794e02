"""Cases of the area combined."""
