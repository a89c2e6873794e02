"""Edge: `python -m torchparts_conformance` and the `torchparts-conformance` command."""

from __future__ import annotations

import sys

from torchparts_conformance._cli import main

if __name__ == "__main__":
    sys.exit(main())
