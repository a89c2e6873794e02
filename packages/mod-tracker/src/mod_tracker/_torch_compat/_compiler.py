"""The compiler: its backends, and what its graphs say of the modules their operators come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

Boxed = Callable[[list[Any]], Any]
"""Runs a graph on a list of its inputs, which it empties."""

Seen = Callable[[Any, Boxed], Boxed]
"""Is given a graph module before it is compiled, and what runs it; returns what to run instead."""

Backend = Callable[..., Any]

ModuleStack = tuple[tuple[int, str, type], ...]
"""`id`, name and class of the modules around an operator, the outermost first."""


def _boxed(run: Callable[[list[Any]], Any]) -> Boxed:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _not_from_cache() -> Any:
    # What comes from a cache was compiled without being seen.
    config = getattr(import_module("torch._functorch.config"), "patch", None)
    return nullcontext() if config is None else config(enable_autograd_cache=False)


def inductor_seen(seen: Seen) -> Backend:
    """Return a backend that compiles as "inductor" does, and shows each graph before."""

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        compile_fx = import_module("torch._inductor.compile_fx")

        def inner(part: Any, examples: Any, **more: Any) -> Boxed:
            noted = seen(part, lambda args: compiled(args))
            compiled = compile_fx.compile_fx_inner(part, examples, **more)
            return _boxed(noted)

        with _not_from_cache():
            return compile_fx.compile_fx(graph, inputs, inner_compile=inner, **options)

    return backend


def eager_seen(seen: Seen) -> Backend:
    """Return a backend that runs graphs as "aot_eager" does, and shows each before."""

    def inner(part: Any, examples: Any) -> Boxed:
        return _boxed(seen(part, lambda args: part.forward(*_emptied(args))))

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        aot = import_module("torch._dynamo.backends.common").aot_autograd
        split = import_module("functorch.compile").min_cut_rematerialization_partition
        with _not_from_cache():
            return aot(fw_compiler=inner, bw_compiler=inner, partition_fn=split)(graph, inputs)

    return backend


def _emptied(args: list[Any]) -> list[Any]:
    taken = list(args)
    args.clear()
    return taken


def module_stack(node: Any) -> tuple[ModuleStack, bool]:
    """Return the modules around a node of a graph, and whether it is of the forward.

    A node of the backward has those of the node of the forward that it belongs to.
    """
    own, of_forward = node.meta.get("nn_module_stack"), node.meta.get("fwd_nn_module_stack")
    found: list[tuple[int, str, type]] = []
    for key, (name, kind) in (own or of_forward or {}).items():
        number = str(key).partition("@")[0]  # a module that is called again has its call behind
        found.append((int(number) if number.isdigit() else -1, name, kind))
    return tuple(found), own is not None
