"""When units are gathered, resharded and reduced in a pass."""
