"""Patch megatron-core to train on a machine without CUDA, over gloo. With CUDA nothing is patched.

megatron-core 0.16.1 uses `device="cuda"` and torch.cuda (devices, synchronization, random states) in some fifty places.
On a machine without CUDA all of them use the CPU instead.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")
_TRACKERS = ("torch.utils.tensorboard", "wandb")
"""megatron-core imports these if they are installed. Ranks do not use them; without them a rank starts 10% faster."""


def install() -> None:
    """Patch torch and megatron-core in this process. Call this before any process group, model or megatron import."""
    if torch.cuda.is_available():
        return
    torch.compile = _uncompiled
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _install_megatron()


def _install_megatron() -> None:
    """Point megatron-core's own random-state functions at the CPU generator."""
    with _hide_modules(_TRACKERS):
        from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


@contextmanager
def _hide_modules(names: tuple[str, ...]) -> Iterator[None]:
    """Make modules that are not loaded yet look as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _uncompiled(model: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Return the function uncompiled: megatron-core compiles some at import, which takes half of a rank's start-up."""
    return model if model is not None else _uncompiled


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tensor factory, with CUDA devices replaced by the CPU and without pinned memory."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make
