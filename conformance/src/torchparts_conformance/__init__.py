"""Requirements for four training parts, and a suite that checks any implementation."""

__version__ = "0.1.0"
