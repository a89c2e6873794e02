"""Checkpoint wrappers with one fault each, made from a working implementation."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from torchparts_conformance.mutants import mutant, overlay

INNER = "_checkpoint_wrapped_module"
PREFIX = INNER + "."


def faulty(part: Any, **names: Any) -> Any:
    """The part, its CheckpointWrapper with some methods replaced."""
    kind = type("CheckpointWrapper", (part.CheckpointWrapper,), names)
    kind.__module__, kind.__qualname__ = __name__, "FaultyCheckpointWrapper"
    globals()["FaultyCheckpointWrapper"] = kind  # where pickle looks for it

    def make(
        module, checkpoint_impl=part.CheckpointImpl.NO_REENTRANT, checkpoint_fn=None, **options
    ):
        return kind(module, checkpoint_impl, checkpoint_fn, **options)

    return overlay(part, checkpoint_wrapper=make, CheckpointWrapper=kind)


def faulty_call(part: Any, change: Callable[..., Any]) -> Any:
    """The part, `change(wrapper, call, args, kwargs)` in the place of a wrapper's forward."""
    working = part.CheckpointWrapper.forward

    def forward(self, *args, **kwargs):
        return change(self, functools.partial(working, self), args, kwargs)

    return faulty(part, forward=forward)


def faulty_init(part: Any, change: Callable[[Any], None]) -> Any:
    """The part, `change(wrapper)` after a wrapper is made."""
    working = part.CheckpointWrapper.__init__

    def init(self, *args, **kwargs):
        working(self, *args, **kwargs)
        change(self)

    return faulty(part, __init__=init)


def faulty_options(part: Any, change: Callable[..., Any]) -> Any:
    """The part, `change(arguments)` over the arguments of `checkpoint_wrapper`."""
    working = part.checkpoint_wrapper

    def make(
        module, checkpoint_impl=part.CheckpointImpl.NO_REENTRANT, checkpoint_fn=None, **options
    ):
        module, impl, fn, options = change(module, checkpoint_impl, checkpoint_fn, options)
        return working(module, impl, fn, **options)

    return overlay(part, checkpoint_wrapper=make)


def faulty_offload(part: Any, change: Callable[..., Any]) -> Any:
    """The part, `change(call, args, kwargs)` in the place of an OffloadWrapper's forward."""
    working = part.OffloadWrapper.forward

    def forward(self, *args, **kwargs):
        return change(functools.partial(working, self), args, kwargs)

    kind = type("OffloadWrapper", (part.OffloadWrapper,), {"forward": forward})
    return overlay(part, offload_wrapper=kind, OffloadWrapper=kind)


def faulty_apply(part: Any, change: Callable[..., Any]) -> Any:
    """The part, `change(working, model, wrapper_fn, options)` for applying."""
    working = part.apply_activation_checkpointing

    def apply(model, checkpoint_wrapper_fn=part.checkpoint_wrapper, **options):
        return change(working, model, checkpoint_wrapper_fn, options)

    return overlay(part, apply_activation_checkpointing=apply)


def is_reentrant(wrapper: Any) -> bool:
    """Whether a wrapper recomputes reentrantly."""
    return wrapper.checkpoint_impl.name == "REENTRANT"


def detached(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return value.detach() if isinstance(value, torch.Tensor) else value


@mutant(
    area="ckpt-wrap",
    kills={"CW-001", "CW-010", "CW-022", "CW-023", "CW-024", "CW-026", "CW-049", "CW-050"},
)
def state_dict_keeps_the_prefix(part):
    """Keys of the state dict show the wrapper."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for key in [k for k in state if k.startswith(prefix)]:
            state[prefix + PREFIX + key[len(prefix) :]] = state.pop(key)
        return state

    return faulty(part, state_dict=state_dict)


@mutant(area="ckpt-wrap", kills={"CW-002", "CW-019", "CW-022", "CW-023", "CW-024", "CW-051"})
def plain_state_dict_does_not_load(part):
    """Nothing gives plain keys the place of the inner module's."""
    return faulty_init(part, lambda wrapper: wrapper._load_state_dict_pre_hooks.clear())


@mutant(area="ckpt-wrap", kills={"CW-003", "CW-081"})
def offload_drops_keywords(part):
    """An offloaded module does not get its keyword arguments."""
    return faulty_offload(part, lambda call, args, kwargs: call(*args))


@mutant(area="ckpt-wrap", kills={"CW-004"})
def reentrant_needs_a_positional_argument(part):
    """Keyword arguments alone raise under REENTRANT."""

    def change(wrapper, call, args, kwargs):
        if is_reentrant(wrapper) and not args:
            raise ValueError("Unexpected keyword arguments")
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-005", "CW-052"})
def recompute_context_is_forgotten(part):
    """The second context of `context_fn` is not entered."""

    def change(module, impl, fn, options):
        given = options.get("context_fn")
        if given is not None and fn is None and not isinstance(given, type):
            options["context_fn"] = lambda: (given()[0], contextlib.nullcontext())
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-006"})
def options_of_checkpoint_fn_are_lost(part):
    """A `checkpoint_fn` gets None for its options."""

    def change(module, impl, fn, options):
        if fn is not None and fn is not checkpoint:
            options = dict.fromkeys(options)
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-007"})
def keeps_its_result(part):
    """Saves its own result for backward, too."""

    def change(wrapper, call, args, kwargs):
        result = call(*args, **kwargs)
        return result * torch.ones_like(result) if isinstance(result, torch.Tensor) else result

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-008"})
def cannot_be_indexed(part):
    """Indexing is not forwarded."""

    def getitem(self, key):
        raise TypeError("'CheckpointWrapper' object is not subscriptable")

    return faulty(part, __getitem__=getitem)


@mutant(area="ckpt-wrap", kills={"CW-009"})
def attributes_are_those_of_the_start(part):
    """Attributes the inner module gets later are not found."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if name == "note":
            raise AttributeError(name)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)


@mutant(area="ckpt-wrap", kills={"CW-010"})
def own_parameter_names_show_the_prefix(part):
    """`named_parameters()` of the wrapper itself has names the state dict lacks."""

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        for name, parameter in getattr(self, INNER).named_parameters():
            yield PREFIX + name, parameter

    return faulty(part, named_parameters=named_parameters)


@mutant(area="ckpt-wrap", kills={"CW-011", "CW-039", "CW-081"})
def offload_brings_back_other_numbers(part):
    """What comes back is not what left."""

    def change(call, args, kwargs):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 1.5, lambda t: t):
            return call(*args, **kwargs)

    working = part.checkpoint_wrapper

    def make(module, *args, **options):
        return working(module, *args, **options)

    return overlay(faulty_offload(part, change), checkpoint_wrapper=make)


@mutant(
    area="ckpt-wrap",
    kills={
        *("CW-008", "CW-009", "CW-012", "CW-018", "CW-028"),
        *("CW-039", "CW-040", "CW-041", "CW-051"),
    },
)
def wraps_a_copy(part):
    """The wrapper holds a copy of the module."""

    def change(module, impl, fn, options):
        return copy.deepcopy(module), impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-013", "CW-034"})
def check_fn_sees_children_only(part):
    """Modules below the first level are not looked at where a `check_fn` selects."""

    def change(working, model, wrapper_fn, options):
        if "check_fn" not in options:
            return working(model, wrapper_fn, **options)
        first = set(model.children())
        check = options["check_fn"]
        return working(model, wrapper_fn, check_fn=lambda m: m in first and check(m))

    return faulty_apply(part, change)


@mutant(area="ckpt-wrap", kills={"CW-014"})
def class_policies_select_leaves_of_another_class(part):
    """A ModuleWrapPolicy is taken to mean every module without children."""

    def change(working, model, wrapper_fn, options):
        if (
            isinstance(options.get("auto_wrap_policy"), ModuleWrapPolicy)
            and len(list(model.modules())) > 4
        ):
            options = {"check_fn": lambda m: not list(m.children())}
        return working(model, wrapper_fn, **options)

    return faulty_apply(part, change)


@mutant(area="ckpt-wrap", kills={"CW-015"})
def policy_options_are_lost(part):
    """Options a CustomPolicy gives are dropped."""

    def change(working, model, wrapper_fn, options):
        return working(model, lambda module, **_: wrapper_fn(module), **options)

    return faulty_apply(part, change)


@mutant(area="ckpt-wrap", kills={"CW-016"})
def any_policy_will_do(part):
    """What is no policy selects nothing."""

    def change(working, model, wrapper_fn, options):
        if isinstance(options.get("auto_wrap_policy"), int):
            return None
        return working(model, wrapper_fn, **options)

    return faulty_apply(part, change)


@mutant(area="ckpt-wrap", kills={"CW-017", "CW-038", "CW-039"})
def random_numbers_are_not_replayed(part):
    """Recomputation draws new random numbers."""

    def change(module, impl, fn, options):
        if fn is None and not options:
            options = {"preserve_rng_state": False}
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(
    area="ckpt-wrap",
    kills={
        "CW-005",
        "CW-006",
        "CW-007",
        "CW-018",
        "CW-036",
        "CW-037",
        "CW-039",
        "CW-045",
        "CW-052",
        "CW-054",
    },
)
def nothing_is_recomputed(part):
    """The module runs as it is."""

    def change(wrapper, call, args, kwargs):
        return getattr(wrapper, INNER)(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-019"})
def copies_share_weights(part):
    """A deepcopy is the wrapper itself."""
    return faulty(part, __deepcopy__=lambda self, memo: self)


@mutant(area="ckpt-wrap", kills={"CW-010", "CW-020", "CW-021"})
def parents_show_the_prefix(part):
    """Names a parent gives contain the wrapper's part."""
    return faulty(part, named_modules=nn.Module.named_modules)


@mutant(area="ckpt-wrap", kills={"CW-019", "CW-022"})
def prefix_is_added_again(part):
    """A key that carries the prefix gets it once more when loaded."""

    def change(wrapper):
        def again(module, state_dict, prefix, *rest):
            for key in [k for k in state_dict if k.startswith(prefix + PREFIX)]:
                state_dict[prefix + PREFIX + key[len(prefix) :]] = state_dict.pop(key)

        handle = wrapper.register_load_state_dict_pre_hook(again)
        wrapper._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)

    return faulty_init(part, change)


@mutant(area="ckpt-wrap", kills={"CW-023"})
def load_errors_show_the_prefix(part):
    """Keys in messages are the wrapper's."""
    return faulty_init(part, lambda wrapper: wrapper._load_state_dict_post_hooks.clear())


@mutant(area="ckpt-wrap", kills={"CW-024"})
def versions_are_the_wrappers(part):
    """The state dict says version 1 for the wrapped module."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        if hasattr(state, "_metadata"):
            state._metadata[kwargs.get("prefix", "")[:-1]] = {"version": 1}
        return state

    return faulty(part, state_dict=state_dict)


@mutant(area="ckpt-wrap", kills={"CW-025", "CW-027", "CW-030"})
def buffers_are_not_found(part):
    """The wrapper's own dict of buffers is empty."""
    return faulty_init(part, lambda wrapper: wrapper.__dict__.update(_buffers={}))


@mutant(area="ckpt-wrap", kills={"CW-026"})
def layers_are_set_on_the_wrapper(part):
    """A module assigned through the wrapper stays on it."""
    working = part.CheckpointWrapper.__setattr__

    def setattr_(self, name, value):
        if name == "linear":
            self.__dict__[name] = value
        else:
            working(self, name, value)

    return faulty(part, __setattr__=setattr_)


@mutant(area="ckpt-wrap", kills={"CW-027"})
def flags_are_set_on_the_wrapper(part):
    """A plain attribute assigned through the wrapper stays on it."""
    working = part.CheckpointWrapper.__setattr__

    def setattr_(self, name, value):
        if name == "flag":
            self.__dict__[name] = value
        else:
            working(self, name, value)

    return faulty(part, __setattr__=setattr_)


@mutant(area="ckpt-wrap", kills={"CW-028"})
def has_no_length(part):
    """`len` is not forwarded."""

    def length(self):
        raise TypeError("object of type 'CheckpointWrapper' has no len()")

    return faulty(part, __len__=length, __bool__=lambda self: True)


@mutant(area="ckpt-wrap", kills={"CW-029"})
def looks_for_the_inner_module_forever(part):
    """An instance without an inner module recurses."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if "_modules" not in self.__dict__:
            return getattr(self, INNER)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)


@mutant(area="ckpt-wrap", kills={"CW-027", "CW-030", "CW-050"})
def parameters_are_not_found(part):
    """The wrapper's own dict of parameters is empty."""
    return faulty_init(part, lambda wrapper: wrapper.__dict__.update(_parameters={}))


@mutant(area="ckpt-wrap", kills={"CW-031"})
def anything_can_be_wrapped(part):
    """What is no module becomes an identity, what is no implementation the default."""

    def change(module, impl, fn, options):
        module = module if isinstance(module, nn.Module) else nn.Identity()
        impl = impl if isinstance(impl, part.CheckpointImpl) else part.CheckpointImpl.NO_REENTRANT
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-032"})
def unknown_options_are_dropped(part):
    """An option nobody knows is ignored."""

    def change(module, impl, fn, options):
        options.pop("bogus", None)
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-033"})
def shared_modules_get_several_wrappers(part):
    """Every place but the first gets a wrapper of its own."""

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


@mutant(area="ckpt-wrap", kills={"CW-034"})
def applying_again_wraps_again(part):
    """A wrapped module is wrapped once more by the next application."""

    def change(working, model, wrapper_fn, options):
        wrapped = [m for m in model.modules() if isinstance(m, part.ActivationWrapper)]
        for wrapper in wrapped:
            setattr(wrapper, INNER, wrapper_fn(getattr(wrapper, INNER)))
        if not wrapped:
            working(model, wrapper_fn, **options)

    return faulty_apply(part, change)


@mutant(area="ckpt-wrap", kills={"CW-035"})
def selecting_nothing_is_silent(part):
    """No warning and no error."""

    def change(working, model, wrapper_fn, options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            working(model, wrapper_fn, **options)

    return faulty_apply(part, change)


@mutant(area="ckpt-wrap", kills={"CW-036", "CW-037"})
def keyword_tensors_are_only_remembered(part):
    """Tensors given by keyword are bound to the function instead of saved."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if is_reentrant(wrapper) or "function" in kwargs or not (args and kwargs):
            return call(*args, **kwargs)
        if isinstance(wrapper.checkpoint_fn, functools.partial) or hasattr(
            wrapper.checkpoint_fn, "keywords"
        ):
            return call(*args, **kwargs)
        return wrapper.checkpoint_fn(functools.partial(inner, **kwargs), *args)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-038"})
def random_numbers_need_a_positional_tensor(part):
    """Where all tensors are keywords, recomputation draws new random numbers."""

    def change(wrapper, call, args, kwargs):
        if args or is_reentrant(wrapper):
            return call(*args, **kwargs)
        names = tuple(kwargs)

        def by_position(*values):
            return getattr(wrapper, INNER)(**dict(zip(names, values, strict=True)))

        return checkpoint(
            by_position, *kwargs.values(), use_reentrant=False, preserve_rng_state=False
        )

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-039"})
def checkpoint_around_offload_only_offloads(part):
    """An offloaded module that is checkpointed is not recomputed."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if isinstance(inner, part.OffloadWrapper):
            return inner(*args, **kwargs)
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-040"})
def option_names_are_swallowed(part):
    """A keyword named `debug` does not reach the module."""

    def change(wrapper, call, args, kwargs):
        kwargs.pop("debug", None)
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-041"})
def batch_norm_counts_twice(part):
    """Statistics advance once more per step."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if any(isinstance(m, nn.BatchNorm1d) for m in inner.modules()) and torch.is_grad_enabled():
            with torch.no_grad():
                inner(*args, **kwargs)
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-042"})
def dict_results_lose_their_graph(part):
    """Tensors in a dict come out detached under REENTRANT."""

    def change(wrapper, call, args, kwargs):
        result = call(*args, **kwargs)
        if is_reentrant(wrapper) and isinstance(result, dict):
            return {name: detached(value) for name, value in result.items()}
        return result

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-043"})
def parameters_need_an_input_with_gradients(part):
    """Without one, the result is detached under REENTRANT."""

    def change(wrapper, call, args, kwargs):
        result = call(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if is_reentrant(wrapper) and tensors and not any(t.requires_grad for t in tensors):
            return detached(result)
        return result

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-044"})
def nested_inputs_lose_their_graph(part):
    """Tensors in a list go in detached under REENTRANT."""

    def change(wrapper, call, args, kwargs):
        if is_reentrant(wrapper):
            args = [[detached(v) for v in a] if isinstance(a, list) else a for a in args]
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-045"})
def contexts_are_made_for_nothing(part):
    """`context_fn` is called where gradients are off."""
    contexts: dict[int, Callable[[], Any]] = {}
    broken = faulty_call(
        part,
        lambda wrapper, call, args, kwargs: (
            None if torch.is_grad_enabled() else contexts.get(id(wrapper), tuple)(),
            call(*args, **kwargs),
        )[1],
    )
    working = broken.checkpoint_wrapper

    def make(module, *args, **options):
        wrapper = working(module, *args, **options)
        contexts[id(wrapper)] = options.get("context_fn", tuple)
        return wrapper

    return overlay(broken, checkpoint_wrapper=make)


@mutant(area="ckpt-wrap", kills={"CW-046"})
def torch_func_is_refused(part):
    """A tensor that torch.func differentiates raises."""

    def change(wrapper, call, args, kwargs):
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if args and "GradTrackingTensor" in repr(args[0]):
            raise RuntimeError("saved tensor hooks are not supported")
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-047", "CW-081"})
def offload_copies_on_the_cpu(part):
    """What is saved is copied, wherever it is."""

    def change(call, args, kwargs):
        def pack(tensor):
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor.detach())

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return call(*args, **kwargs)

    return faulty_offload(part, change)


@mutant(area="ckpt-wrap", kills={"CW-048"})
def torchs_checkpoint_gets_keywords(part):
    """Torch's own checkpoint, given as `checkpoint_fn`, gets keyword arguments as keywords."""

    def change(module, impl, fn, options):
        if fn is checkpoint:
            return module, impl, functools.partial(fn, **options), {}
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-049"})
def every_wrapper_scans_the_state_dict(part):
    """Taking the state dict, each wrapper goes through all entries there are."""
    working = part.CheckpointWrapper.state_dict

    def state_dict(self, *args, **kwargs):
        state = working(self, *args, **kwargs)
        list(state.keys())
        return state

    return faulty(part, state_dict=state_dict)


@mutant(area="ckpt-wrap", kills={"CW-050"})
def parametrize_works_on_the_wrapper(part):
    """The property of a parametrization goes into the wrapper's class."""
    of_object = vars(object)["__class__"]

    def setattr_(self, name, value):
        if name == "__class__":
            of_object.__set__(self, value)
        else:
            part.CheckpointWrapper.__setattr__(self, name, value)

    return faulty(part, __setattr__=setattr_, __class__=property(type))


def forget_versions_below(wrapper: Any, *_: Any) -> None:
    """Have the modules below the wrapped one see no version, in the load that begins."""
    for module in list(getattr(wrapper, INNER).modules())[1:]:
        load = type(module)._load_from_state_dict
        load_once = functools.partial(load_without_version, module, load)
        vars(module)["_load_from_state_dict"] = load_once


def load_without_version(
    module: Any, load: Any, state_dict: Any, prefix: str, _: Any, *rest: Any
) -> None:
    """Load once without what the state dict says of the version."""
    vars(module).pop("_load_from_state_dict")
    load(module, state_dict, prefix, {}, *rest)


@mutant(area="ckpt-wrap", kills={"CW-051"})
def versions_below_the_wrapped_module_are_lost(part):
    """Only the wrapped module itself sees its version."""
    return faulty_init(
        part, lambda wrapper: wrapper.register_load_state_dict_pre_hook(forget_versions_below)
    )


@mutant(area="ckpt-wrap", kills={"CW-052"})
def offload_decisions_mean_recompute(part):
    """A result that is to be offloaded is computed again."""

    def change(module, impl, fn, options):
        given = options.get("context_fn")

        def contexts():
            forward, recompute = given()
            decide = getattr(forward, "policy_fn", None)
            if decide is not None:
                forward.policy_fn = lambda *args, **kwargs: never_offload(decide(*args, **kwargs))
            return forward, recompute

        if callable(given) and not isinstance(given, type):
            options["context_fn"] = contexts
        return module, impl, fn, options

    return faulty_options(part, change)


def never_offload(decision: Any) -> Any:
    """The decision, or to recompute in the place of offloading."""
    if getattr(decision, "name", "") == "MUST_CPU_OFFLOAD":
        return CheckpointPolicy.MUST_RECOMPUTE
    return decision


@mutant(area="ckpt-wrap", kills={"CW-053"})
def copies_as_the_module_wants(part):
    """The wrapped module's way of being copied is taken for the wrapper's."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if name == "__deepcopy__" and "_modules" in self.__dict__:
            return getattr(getattr(self, INNER), name)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)


@mutant(area="ckpt-wrap", kills={"CW-054"})
def differences_are_not_looked_for(part):
    """The shapes of what recomputation saves are not compared."""

    def change(module, impl, fn, options):
        if fn is None and not options and impl is part.CheckpointImpl.NO_REENTRANT:
            options = {"determinism_check": "none"}
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant(area="ckpt-wrap", kills={"CW-094"})
def hooks_are_registered_again(part):
    """Recomputes by torch's own function, which registers the hooks of forward again."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if isinstance(inner, part.OffloadWrapper) or "Hooked" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-095"})
def caches_are_appended_to_again(part):
    """Runs the module over the caller's own objects in recomputation."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if "Cached" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-108"})
def attributes_of_numbers_are_not_noted(part):
    """Takes whatever is a number or a word for a plain value in recomputation."""

    def change(wrapper, call, args, kwargs):
        if all(type(each) in (float, str) or not isinstance(each, float | str) for each in args):
            return call(*args, **kwargs)
        return checkpoint(getattr(wrapper, INNER), *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-096"})
def tensors_in_objects_are_not_checked(part):
    """Recomputes over a tensor that forward has changed in place."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if "Buffered" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-097"})
def parameters_decide_what_is_recomputed(part):
    """Runs a module as it is where neither an input nor a parameter requires grad."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        looked_at = [*inner.parameters(), *(a for a in args if isinstance(a, torch.Tensor))]
        if any(tensor.requires_grad for tensor in looked_at):
            return call(*args, **kwargs)
        return inner(*args, **kwargs)

    return faulty_call(part, change)


@mutant(area="ckpt-wrap", kills={"CW-100"})
def weights_of_a_functional_call_are_forgotten(part):
    """Recomputes with the parameters that the module has by then."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if all(isinstance(weight, nn.Parameter) for weight in inner.parameters()):
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)
