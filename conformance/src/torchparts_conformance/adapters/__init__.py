"""Adapters that come with the suite; each imports what it adapts only when it is used."""
