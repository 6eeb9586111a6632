"""Let NeMo train on a machine without CUDA, over gloo. With CUDA, nothing is changed."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from jobs.engines.megatron import cpu_patch


def install() -> None:
    """Patch torch and megatron-core in this process. Call this before importing NeMo."""
    if torch.cuda.is_available():
        return
    cpu_patch.install()
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]  # patched
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]  # patched
    torch.Tensor.to = _to(torch.Tensor.to)  # type: ignore[method-assign]  # patched
    torch.Tensor.type = _type(torch.Tensor.type)  # type: ignore[method-assign]  # patched


def install_adapters() -> None:
    """Let NeMo add adapters to megatron-core's linears: it compares classes with those of Transformer Engine.

    Without Transformer Engine, megatron-core has mocks that are not classes, and NeMo would use them as classes.
    """
    from nemo.collections.llm.peft import lora, utils

    if not lora.HAVE_TE:
        lora.te, utils.HAVE_TE = SimpleNamespace(Linear=None), False


class _NoStream:
    """Replaces a CUDA stream: NeMo wraps models for data parallelism on a side stream."""


def _to(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return Tensor.to with "cuda" mapped to the CPU. NeMo moves the reports of each step to "cuda"."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return method(self, *("cpu" if arg == "cuda" else arg for arg in args), **kwargs)

    return to


def _type(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return Tensor.type; megatron-core's optimizers compare the type name of a gradient with CUDA's."""

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = method(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    return named
