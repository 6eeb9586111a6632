"""Profiler ranges of phases and model parts, for launch.profile=modules. Without a profiler a range does nothing.

    with profile_range(Part.qkv):
        qkv_MO = …

A kernel belongs to the innermost range of the thread that launches it. Autograd's backward passes need no ranges: their
kernels belong to the range of the forward operation. The forward pass of a module that runs inside a backward pass is
recomputation.
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


def profile_range(what: Phase | Part) -> AbstractContextManager[Any]:
    """Return the range of a phase of the step or of a part of the model."""
    return _range(_NAMES[what]) if _is_on else _NOTHING


def step() -> AbstractContextManager[Any]:
    """Return the range of one optimizer step."""
    return _range(STEP) if _is_on else _NOTHING


def forward_range(part: Part) -> AbstractContextManager[Any]:
    """Return the range of a part's forward pass, and of recomputation if this runs inside a backward pass."""
    return _forward_range(part) if _is_on else _NOTHING


@contextmanager
def _forward_range(part: Part) -> Iterator[None]:
    recomputed = profile_range(Phase.recomputation) if _is_in_backward() else _NOTHING
    with recomputed, profile_range(part):
        yield


def parse_label(label: str) -> Phase | Part | None:
    """Return the phase or part of a range in a trace; None for other ranges."""
    return _LABELS.get(label)


@contextmanager
def enabled(modules: "Iterable[tuple[torch.nn.Module, Part]]" = ()) -> Iterator[None]:
    """Record ranges inside the block, and a range around each forward pass of the modules."""
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
    """Register hooks that open a range before a module's forward pass and close it afterwards.

    The range is also closed after an exception: torch ends the recomputation of a layer by one, as soon as all saved
    tensors are there.
    """
    opened: list[AbstractContextManager[Any]] = []

    def open_range(*_unused: object) -> None:
        opened.append(forward_range(part))
        opened[-1].__enter__()

    def close(*_unused: object) -> None:
        opened.pop().__exit__(None, None, None)

    yield module.register_forward_pre_hook(open_range)
    yield module.register_forward_hook(close, always_call=True)


def _is_in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread, as torch.utils.module_tracker finds out."""
    import torch

    return torch._C._current_graph_task_id() != -1


def _range(label: str) -> AbstractContextManager[Any]:
    from torch.profiler import record_function

    return record_function(label)
