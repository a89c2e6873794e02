"""The options of checkpointing are checked when they are given, and the error names the option."""

from __future__ import annotations

import pytest
from torch import nn

from ckpt_wrap import CheckpointImpl, OptionError, checkpoint_


def test_context_fn_and_reentrant_conflict():
    """The option that cannot work is named when the module is wrapped."""
    with pytest.raises(OptionError, match="'context_fn' is set with checkpoint_impl"):
        checkpoint_(nn.Linear(1, 1), checkpoint_impl=CheckpointImpl.REENTRANT, context_fn=dict)
