"""Entry point of `python -m torchparts_conformance` and of the command `torchparts-conformance`."""

from __future__ import annotations

import sys

from torchparts_conformance._cli import main

if __name__ == "__main__":
    sys.exit(main())
