"""`python -m sac_policies plan MODEL`: memory and time of a training step, without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from ._errors import SacError
from .budget._sizes import parse_size
from .plan._devices import DEVICES, device_named
from .plan._model import OPTIMIZERS, parse_tokens
from .plan._plan import estimate
from .plan._report import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan.

    Returns:
        0 if a step fits, 1 if nothing fits, 2 if the input is invalid, 3 if the model fails.
    """
    options = _parser().parse_args(arguments)
    try:
        found = estimate(
            options.model,
            device_named(options.device),
            parse_tokens(options.tokens),
            optimizer=options.optimizer,
            dtype=getattr(torch, options.dtype),
            budget_bytes=None if options.memory is None else parse_size(options.memory),
        )
    except SacError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # of the model
        if options.traceback:
            raise
        reason = " ".join(str(error).split())[:500]
        print(
            f"sac_policies plan: {options.model!r} fails on tensors without data: "
            f"{type(error).__name__}: {reason}. Add --traceback to see where.",
            file=sys.stderr,
        )
        return 3
    print(report(found))
    return 0 if found.recommended else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sac_policies")
    plan = parser.add_subparsers(required=True).add_parser(
        "plan", help="say what a training step takes on a device, from tensors without data"
    )
    add = plan.add_argument
    add("model", help="module:function that returns (model, batch), or a transformers config")
    add("--device", required=True, help=", ".join(device.name for device in DEVICES))
    add("--tokens", default="4k", help='of a step: "32k", or "4x8k" for four sequences')
    add("--optimizer", default="adamw", choices=OPTIMIZERS)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--memory", help='what a step may take, such as "60 GiB"; default: 95 %% of the device')
    add("--traceback", action="store_true", help="if the model fails, print where")
    return parser


if __name__ == "__main__":
    sys.exit(main())
