"""Adapter of one implementation: the module under test and its distribution."""

from torchparts_conformance import Implementation

implementation = Implementation(
    name="my tracker",
    version="1.0",
    distributions=("my-tracker",),  # as `pip list` names it
    parts={"mod-tracker": "torch.distributed._tools.mod_tracker"},  # your module
)
