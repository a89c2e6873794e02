"""Helpers for faults of the area flat-param: handles that are replaced or changed."""

from __future__ import annotations

from torchparts_conformance.mutants import overlay


def with_handle(part, handle):
    """The part with another handle class, named like the original in messages."""
    handle.__name__ = "FlatParamHandle"
    return overlay(part, FlatParamHandle=handle)


def after(part, fault):
    """The part with a handle that is changed after construction."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, params, module, *args, **kwargs):
            params = list(params)
            super().__init__(params, module, *args, **kwargs)
            fault(self, module, params)

    return with_handle(part, Faulty)


def before(part, fault):
    """The part with a handle whose parameters are changed first."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, params, module, *args, **kwargs):
            super().__init__(fault(list(params), module), module, *args, **kwargs)

    return with_handle(part, Faulty)


def retype(handle, **names):
    """Give the flat parameter a class with other methods."""
    kind = type(handle.flat_param)
    handle.flat_param.__class__ = type(kind.__name__, (kind,), names)
