"""Adapters that come with the suite. Each imports its library only when it is used."""
