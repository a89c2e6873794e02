"""State dicts of modules and optimizers, and checks of optimizers."""
