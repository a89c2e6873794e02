"""The errors of this package: one base class, and a subclass per kind of mistake.

Messages begin with ``flat_param.<function>:`` and end with a remedy. Errors of `FlatParamHandle`
have torch's messages.
"""

from __future__ import annotations


class FlatParamError(Exception):
    """Base class of this package's errors."""


class ParameterError(FlatParamError, ValueError):
    """A parameter cannot be flattened, or does not fit its planned place."""


class LayoutError(FlatParamError, ValueError):
    """The requested layout or shard plan is impossible."""


class VectorError(FlatParamError, ValueError):
    """A vector does not fit the segment it was given for."""


class StateError(FlatParamError, RuntimeError):
    """The operation is not allowed in the current state."""


class CommError(FlatParamError, RuntimeError):
    """Ranks have different arguments, or a rank does not respond."""


class CheckpointError(FlatParamError, RuntimeError):
    """A checkpoint is truncated, foreign or does not match the module."""
