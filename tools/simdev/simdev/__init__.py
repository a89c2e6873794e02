"""A simulated accelerator: `import simdev`, then `torch.device("simdev", 0)` and `torch.simdev`.

It has two devices with asynchronous streams, an allocator with CUDA's rules and pinned memory, and
it reports every race between streams. The README lists what it does not simulate. It is built on
the first import. `python -m simdev COMMAND...` runs Python with the device registered in that
process and in all its children.
"""

from __future__ import annotations

import torch

from ._build import BuildError, extension, is_built, missing

__all__ = ["BuildError", "autoload", "is_built", "missing"]

torch.utils.rename_privateuse1_backend("simdev")
_C = extension()


def _register() -> None:
    import torch._meta_registrations  # shapes are computed before kernels run

    from ._group import register_group
    from ._module import make_module

    torch._register_device_module("simdev", make_module(_C))
    torch.utils.generate_methods_for_privateuse1_backend()
    register_group(_C)


def autoload() -> None:
    """Called by torch when it is imported; importing this module registers the device."""


_register()
