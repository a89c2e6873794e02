"""Adapts one implementation: what is judged, and the distribution that it comes with."""

from torchparts_conformance import Implementation

implementation = Implementation(
    name="my tracker",
    version="1.0",
    distributions=("my-tracker",),  # what a rerun installs: this file has to come with it
    parts={"mod-tracker": "torch.distributed._tools.mod_tracker"},  # put your module here
)
