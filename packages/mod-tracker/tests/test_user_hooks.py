"""The four hooks of the drop-in interface: one of a kind, all of a call or none."""

from __future__ import annotations

from torch import nn

from mod_tracker import ModTracker


def test_hooks_registered_one_by_one_all_stay(x):
    """A second registration of another kind drops nothing."""
    tracker, kinds = ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=lambda *_: kinds.append("pre"))
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("post"))
    with tracker:
        nn.ReLU()(x)
    assert kinds == ["pre", "post"]
