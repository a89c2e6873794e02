"""An estimate as text: causes of memory, levels, the recommendation, and further options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..budget._sizes import format_size
from ._mixture import SLICES, StepEstimate
from ._plan import Estimate

GIB = 1 << 30


def report(one: Estimate) -> str:
    """Return the lines that the command prints."""
    sequences, tokens = one.batch
    lines = [
        f"{one.name}, {one.parameters / 1e6:,.1f} M parameters, {one.block_count} blocks "
        f"({one.block_name}); {sequences} x {tokens:,} tokens; {one.optimizer}",
        f"{one.device.name}: {format_size(one.device.memory_bytes)}, of which a step may take "
        f"{format_size(one.budget_bytes)}",
        "",
        *_causes(one),
        "",
        *_levels(one),
        "",
        *_recommendation(one),
    ]
    return "\n".join(lines)


def _causes(one: Estimate) -> Iterator[str]:
    chosen = one.recommended or one.smallest
    yield f"{'GiB at the peak of a step':<28}{'plain':>10}{_title(one):>14}"
    rows = [
        ("parameters", one.parameter_bytes, one.parameter_bytes),
        ("gradients", one.plain.causes.gradients, chosen.causes.gradients),
        ("optimizer state", one.optimizer_bytes, one.optimizer_bytes),
        ("activations", one.plain.causes.activations, chosen.causes.activations),
        ("logits and loss", one.plain.causes.logits, chosen.causes.logits),
        ("all, with batch and libraries", one.plain.peak_bytes, chosen.peak_bytes),
    ]
    for name, plain, used in rows:
        yield f"  {name:<30}{plain / GIB:>6.2f}{used / GIB:>14.2f}"
    yield f"(all gradients together: {format_size(one.gradient_bytes)}, at the end of backward)"


def _title(one: Estimate) -> str:
    return "recommended" if one.recommended else "smallest"


def _levels(one: Estimate) -> Iterator[str]:
    title = f"{'all blocks on one level':<32}{'GiB':>8}{'ms':>10}{'over plain':>12}"
    yield f"{title}  fits  largest step, tokens"
    for name, step in one.uniform.items():
        fits = "yes" if step.peak_bytes <= one.budget_bytes else "no"
        most = f"{one.most_tokens[name]:,}"
        yield f"  {name:<30}{step.peak_bytes / GIB:>8.2f}{_timed(one, step)}  {fits:<4}{most:>22}"


def _timed(one: Estimate, step: StepEstimate) -> str:
    return f"{step.seconds * 1e3:>10,.1f}{step.seconds / one.plain.seconds:>12.2f}"


def _recommendation(one: Estimate) -> Iterator[str]:
    if one.recommended is None:
        least = one.smallest
        more = format_size(least.peak_bytes - one.budget_bytes)
        yield (
            f"nothing fits {format_size(one.budget_bytes)}: the smallest takes "
            f"{format_size(least.peak_bytes)}, {more} more ({_said(least)})"
        )
    else:
        step = one.recommended
        yield f"recommended: {_said(step)}"
        yield (
            f"expected: {format_size(step.peak_bytes)}, {step.seconds * 1e3:,.1f} ms a step, "
            f"{one.tokens / step.seconds:,.0f} tokens per second"
        )
    device = one.smallest_device
    if device is None:
        yield "smallest device of the table that fits: none"
    else:
        memory = format_size(device.memory_bytes)
        yield f"smallest device of the table that fits: {device.name}, {memory}"
    yield from helps(one)


def _said(step: StepEstimate) -> str:
    parts, first = [], 0
    for name, count in step.levels:
        where = f"blocks {first} to {first + count - 1}" if count > 1 else f"block {first}"
        parts.append(f"{name}: {where}")
        first += count
    return "; ".join(parts)


def helps(one: Estimate) -> Iterator[str]:
    """List further options, with bytes: slices, fewer tokens, offload, sharding."""
    step, sliced = one.recommended, one.sliced
    if sliced and (step is None or sliced.seconds < 0.99 * step.seconds):
        gain = f"{sliced.seconds * 1e3:,.1f} ms a step" + (" instead" if step else "")
        yield f"with logits and loss in_slices({SLICES}): {_said(sliced)}; {gain}"
    if step is not None:
        return
    saved = one.smallest.peak_bytes - one.smallest_sliced.peak_bytes
    if sliced is None and saved > 0:
        yield f"in_slices({SLICES}) of logits and loss saves {format_size(saved)}"
    budget, least = one.budget_bytes, min(one.smallest, one.smallest_sliced, key=_peak)
    variable = least.causes.activations + least.causes.logits
    room = budget - (least.peak_bytes - variable)
    tokens = one.tokens * room // variable if variable else 0
    if 0 < tokens < one.tokens:
        yield f"fewer tokens: about {tokens:,} of {one.tokens:,} in a step would fit"
    if one.optimizer_bytes:
        yield f"optimizer state in host memory saves {format_size(one.optimizer_bytes)}"
    ranks = _ranks(one, least)
    if ranks:
        share = format_size(one.state_bytes // ranks)
        yield (
            f"sharding over {ranks} ranks: each has {share} of {format_size(one.state_bytes)} of "
            "parameters, gradients and optimizer state"
        )


def _peak(step: StepEstimate) -> int:
    return step.peak_bytes


def _ranks(one: Estimate, least: StepEstimate, most: Sequence[int] = (2, 4, 8, 16, 32, 64)) -> int:
    """Return the fewest ranks over which the smallest step would fit; 0 for none."""
    held = one.parameter_bytes + one.optimizer_bytes + least.causes.gradients
    for ranks in most:
        if least.peak_bytes - held + held // ranks <= one.budget_bytes:
            return ranks
    return 0
