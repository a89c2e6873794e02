"""Sharded modules that do not listen after they were made; each fails exactly what it declares."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_sharded

AREA = "flat-param"


def _deaf(part, *names):
    """The part with sharded modules of which some methods do nothing."""

    def change(module, options):
        for name in names:
            setattr(type(module), name, lambda self, *args, **kwargs: None)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-188"})
def methods_run_on_pieces(part):
    """Leaves a registered method as it is."""
    return _deaf(part, "register_forward_method")


@mutant(area=AREA, kills={"FP-189"})
def every_backward_sums(part):
    """Sums gradients whatever is said."""
    return _deaf(part, "set_requires_gradient_sync")


@mutant(area=AREA, kills={"FP-190"})
def units_are_always_freed(part):
    """Frees whole parameters after every forward."""
    return _deaf(part, "set_reshard_after_forward")


@mutant(area=AREA, kills={"FP-191"})
def units_are_gathered_in_their_turn_alone(part):
    """Gathers nothing by hand."""
    return _deaf(part, "unshard")


@mutant(area=AREA, kills={"FP-197"})
def a_columns_gradients_are_doubled(part):
    """Takes what tensor parallel cuts for copies, and adds their gradients up."""

    def change(module, options):
        if options.get("mesh") is not None and options["mesh"].mesh_dim_names == ("dp",):
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(_double)
        return module

    return with_sharded(part, change)


def _double(param):
    param.grad.mul_(2)


@mutant(area=AREA, kills={"FP-192"})
def lists_are_not_read(part):
    """Gathers the next unit, whatever is listed."""
    return _deaf(part, "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
