"""Requirements for four training libraries, and a suite that checks any implementation of them.

The four parts are checkpoint wrappers (`ckpt-wrap`), module tracking (`mod-tracker`), flat
parameters (`flat-param`) and selective checkpointing (`sac-policies`). An
`Implementation` tells the suite where its parts are.

    from torchparts_conformance import Implementation

    implementation = Implementation(
        name="mine", version="1.0", distributions=("mine",), parts={"ckpt-wrap": "mine.checkpoint"}
    )
"""

from torchparts_conformance._implementation import PROTOCOL, Implementation
from torchparts_conformance.requirements._requirement import requirement

__all__ = ["PROTOCOL", "Implementation", "requirement"]
__version__ = "0.1.0"
