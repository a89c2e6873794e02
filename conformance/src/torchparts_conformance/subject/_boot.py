"""The first lines of a process of the suite, run as a file by `python -I -S`.

Such a process finds the standard library and nothing else: no site-packages, no path files, no
`sitecustomize`, nothing from `PYTHONPATH` or the working directory. What it may find beyond that
is handed over, folder by folder. Only the standard library is imported here; see `_isolation`.
"""

import importlib
import json
import sys


def main() -> None:
    """Take in what is handed over as the first argument, and call the named module's `main`."""
    handed = json.loads(sys.argv[1])
    # Without `site`, Python does not know which environment its interpreter belongs to.
    sys.prefix, sys.exec_prefix = handed["prefixes"]
    sys.path.extend(handed["judge"])
    importlib.import_module("torchparts_conformance.subject._isolation").take_over(handed)
    sys.argv[:2] = [handed["module"]]
    sys.exit(importlib.import_module(handed["module"]).main())


if __name__ == "__main__":
    main()
