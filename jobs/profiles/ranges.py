"""Name what a step is doing, for a profile of modules. Where nothing is profiled, a range does nothing.

    with named(Part.qkv):
        qkv_MO = …

A kernel belongs to the innermost range of the thread that launches it. Backward passes that autograd derives need no
ranges: their kernels belong where the forward pass launched the operation.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from bench.contract.modules import Part, Phase

if TYPE_CHECKING:
    import torch

STEP = "step"
"""The range of one optimizer step."""
_LABELS: dict[str, Phase | Part] = {f"{type(what).__name__.lower()}: {what.name}": what for what in (*Phase, *Part)}
_NAMES = {what: name for name, what in _LABELS.items()}
_NOTHING = nullcontext()
_is_on = False


def named(what: Phase | Part) -> AbstractContextManager[Any]:
    """Return a range: a phase of the step or a part of the model."""
    return _range(_NAMES[what]) if _is_on else _NOTHING


def step() -> AbstractContextManager[Any]:
    """Return the range of one optimizer step."""
    return _range(STEP) if _is_on else _NOTHING


def meant(label: str) -> Phase | Part | None:
    """Return what a range of a trace names; None for one that is not ours."""
    return _LABELS.get(label)


@contextmanager
def switched_on(modules: "Iterable[tuple[torch.nn.Module, Part]]" = ()) -> Iterator[None]:
    """Record ranges in the block, and a range around each forward pass of the modules."""
    global _is_on
    handles = [handle for module, part in modules for handle in _hooks(module, part)]
    _is_on = True
    try:
        yield
    finally:
        _is_on = False
        for handle in handles:
            handle.remove()


def _hooks(module: "torch.nn.Module", part: Part) -> "Iterator[torch.utils.hooks.RemovableHandle]":
    """Let a module open a range before its forward pass and close it afterwards."""
    opened: list[AbstractContextManager[Any]] = []

    def enter(*_unused: object) -> None:
        opened.append(named(part))
        opened[-1].__enter__()

    def leave(*_unused: object) -> None:
        opened.pop().__exit__(None, None, None)

    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave)


def _range(label: str) -> AbstractContextManager[Any]:
    from torch.profiler import record_function

    return record_function(label)
