"""Let NeMo train on a machine without CUDA, over gloo; where CUDA exists, nothing changes."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from jobs.engines.megatron import cpu_patch


def install() -> None:
    """Patch torch and megatron-core in this process. Call it before anything of NeMo is imported."""
    if torch.cuda.is_available():
        return
    cpu_patch.install()
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]  # patched
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]  # patched
    torch.Tensor.to = _to(torch.Tensor.to)  # type: ignore[method-assign]  # patched
    torch.Tensor.type = _type(torch.Tensor.type)  # type: ignore[method-assign]  # patched


def install_adapters() -> None:
    """Let NeMo put adapters on megatron-core's linears: it compares classes with those of Transformer Engine.

    Where there is none, megatron-core has stand-ins that are no classes, and NeMo takes them for the real ones.
    """
    from nemo.collections.llm.peft import lora, utils

    if not lora.HAVE_TE:
        lora.te, utils.HAVE_TE = SimpleNamespace(Linear=None), False


class _NoStream:
    """In place of a stream: NeMo wraps models for data parallelism on a side stream."""


def _to(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return Tensor.to; it reads "cuda" as the CPU. NeMo moves what it reports of each step to "cuda"."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return method(self, *("cpu" if arg == "cuda" else arg for arg in args), **kwargs)

    return to


def _type(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return Tensor.type; megatron-core's optimizers compare the name of a gradient's type with CUDA's."""

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = method(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    return named
