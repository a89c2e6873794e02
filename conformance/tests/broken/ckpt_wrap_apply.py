"""Broken functions that apply wrappers to a model."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant

from .faults.ckpt_wrap import INNER, faulty_apply


@mutant("CW-033")
def shared_modules_get_several_wrappers(part):
    """A module that occurs several times gets several wrappers."""

    def change(working, model, wrapper_fn, options):
        working(model, wrapper_fn, **options)
        seen = set()
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if isinstance(child, part.ActivationWrapper):
                    if child in seen:
                        setattr(parent, name, wrapper_fn(getattr(child, INNER)))
                    seen.add(child)

    return faulty_apply(part, change)


@mutant("CW-034")
def applying_again_wraps_again(part):
    """Applying a second time wraps a wrapped module again."""

    def change(working, model, wrapper_fn, options):
        wrapped = [m for m in model.modules() if isinstance(m, part.ActivationWrapper)]
        for wrapper in wrapped:
            setattr(wrapper, INNER, wrapper_fn(getattr(wrapper, INNER)))
        if not wrapped:
            working(model, wrapper_fn, **options)

    return faulty_apply(part, change)
