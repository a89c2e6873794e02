"""Where the suite is installed; its requirements, cases and schemas are found from here."""

from pathlib import Path

PACKAGE = Path(__file__).parent
