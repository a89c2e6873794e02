"""Broken overlap with other work; each fails exactly the requirements that it declares."""

from __future__ import annotations

from contextlib import contextmanager

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_sharded


@mutant("FP-104 FP-235")
def what_was_accumulated_is_forgotten(part):
    """Drops the gradients of `no_sync` at its end."""

    def change(module, options):
        working = type(module).no_sync

        @contextmanager
        def no_sync(module):
            with working(module):
                yield
            module.zero_grad()

        type(module).no_sync = no_sync
        return module

    return with_sharded(part, change)
