"""The base of both hand-written layers: submodules of megatron-core, recomputation and offloading."""

from typing import Any

from megatron.core.transformer import TransformerLayer

from jobs.engines.megatron.offload import HostActivations
from jobs.engines.megatron.tensor_parallel import ParallelLinear


class HandWrittenLayer(TransformerLayer):
    """megatron-core's layer with its submodules and their names, but with hand-written forward and backward passes.

    ops: the operations that the layer uses.
    recompute_qkv, recompute_fc1: the output is not saved, but recomputed in the backward pass.
    offload: saved activations are in host memory between the forward and the backward pass.
    """

    host: HostActivations | None = None
    """Shared by all layers of a chunk; `model.build` sets it if any of them offloads."""

    def __init__(
        self,
        *args: Any,
        ops: Any,
        recompute_qkv: bool = False,
        recompute_fc1: bool = False,
        offload: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.ops, self.offload = ops, offload
        self.recompute_qkv, self.recompute_fc1 = recompute_qkv, recompute_fc1

    def save_activations(self, ctx: Any, saved: Any) -> None:
        """Save the activations of a forward pass, and offload them if this layer offloads."""
        if self.host is not None:
            ctx.below = self.host.latest
        ctx.saved = self.host.offload(saved) if self.host is not None and self.offload else saved

    def load_activations(self, ctx: Any) -> Any:
        """Return the saved activations, once, and prefetch those of the next offloaded layer below."""
        saved, ctx.saved = ctx.saved, None
        if self.host is None:
            return saved
        saved = self.host.pop(saved) if self.offload else saved
        self.host.prefetch(ctx.below)
        ctx.below = None
        return saved

    @property
    def backward_linears(self) -> list[ParallelLinear]:
        """The linears, in the order in which the backward pass needs their weights."""
        return [self.mlp.linear_fc2, self.mlp.linear_fc1, self.proj, self.qkv]

    @property
    def qkv(self) -> ParallelLinear:
        linear: ParallelLinear = self.self_attention.linear_qkv
        return linear

    @property
    def proj(self) -> ParallelLinear:
        linear: ParallelLinear = self.self_attention.linear_proj
        return linear
