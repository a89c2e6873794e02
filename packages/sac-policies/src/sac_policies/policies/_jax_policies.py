"""Torch: the members of jax.checkpoint_policies, by their names, as policies of this package.

JAX's dot_general and convolution primitives are the catalogue's matrix products and
convolutions; its names are those given by `sac_policies.name`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import ConflictError, PolicyError, shown
from ._builders import offload, recompute_all, save_all, save_named, save_ops
from ._catalogue import CONVOLUTIONS, MATMULS, MATMULS_2D, QUANTISED
from ._policies import Policy, check_policy

_SCALED = tuple(name for name in QUANTISED.names if "mm" in name)


def everything_saveable() -> Policy:
    """Save everything."""
    return save_all()


def nothing_saveable() -> Policy:
    """Save nothing."""
    return recompute_all()


def dots_saveable() -> Policy:
    """Save matrix products, convolutions and scaled products."""
    return save_ops(MATMULS, CONVOLUTIONS) | save_ops(*_SCALED)


def dots_with_no_batch_dims_saveable() -> Policy:
    """Save matrix products without batch dimensions."""
    return save_ops(MATMULS_2D)


def offload_dot_with_no_batch_dims(
    offload_src: str = "device", offload_dst: str = "pinned_host"
) -> Policy:
    """Keep matrix products without batch dimensions in host memory.

    The two memory kinds are JAX's; here values always go to the host and back.
    """
    del offload_src, offload_dst
    return offload(save_ops(MATMULS_2D))


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Save everything that is not given one of these names."""
    return ~save_named(*names_not_to_save) if names_not_to_save else save_all()


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Save named tensors, but for these names."""
    if not names_not_to_save:
        return save_named("*", missing_ok=True)
    return save_named("*", missing_ok=True) & ~save_named(*names_not_to_save)


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Save tensors of these names only."""
    return save_named(*names_which_can_be_saved) if names_which_can_be_saved else recompute_all()


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Policy:
    """Save tensors of some names, offload those of others.

    Raises:
        PolicyError: one of them is no list of names.
        ConflictError: a name is in both lists.
    """
    del offload_src, offload_dst
    for names in (names_which_can_be_saved, names_which_can_be_offloaded):
        if not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
            raise PolicyError(
                f"sac_policies.save_and_offload_only_these_names: names {shown(names)} are a "
                f"{type(names).__name__}, but a list of names is needed. Write ['hidden']."
            )
    both = sorted(set(names_which_can_be_saved) & set(names_which_can_be_offloaded))
    if both:
        raise ConflictError(
            f"sac_policies.save_and_offload_only_these_names: names {both} are in both "
            f"{list(names_which_can_be_saved)} and {list(names_which_can_be_offloaded)}, but a "
            "value is kept in one place. Take them out of one list."
        )
    saved = save_only_these_names(*names_which_can_be_saved)
    return saved | offload(save_only_these_names(*names_which_can_be_offloaded))


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
    """Save what either policy saves."""
    for each in (policy_1, policy_2):
        check_policy(each, where="save_from_both_policies")
    return policy_1 | policy_2


checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable
