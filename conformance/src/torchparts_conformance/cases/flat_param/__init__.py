"""Cases of the area flat-param."""
