"""What both hand-written layers share: megatron-core's parts, and the options of their passes."""

from typing import Any

from megatron.core.transformer import TransformerLayer

from jobs.engines.megatron.offload import HostActivations
from jobs.engines.megatron.tensor_parallel import ParallelLinear


class OwnLayer(TransformerLayer):
    """megatron-core's layer, its parts and their names, with a forward and a backward pass of our own.

    ops: the operations that it computes with.
    recompute_qkv, recompute_fc1: their outputs are not saved, but computed again in the backward pass.
    offload: what is saved lies in the host's memory meanwhile.
    """

    host: HostActivations | None = None
    """All layers of a chunk share one; `model.build` sets it where some of them offload."""

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

    def keep(self, ctx: Any, saved: Any) -> None:
        """Keep what a forward pass saved until its backward pass calls `kept`."""
        if self.host is not None:
            ctx.below = self.host.latest
        ctx.saved = self.host.put(saved) if self.host is not None and self.offload else saved

    def kept(self, ctx: Any) -> Any:
        """Return what `keep` got, once; what a layer below needs next is fetched from the host meanwhile."""
        saved, ctx.saved = ctx.saved, None
        if self.host is None:
            return saved
        saved = self.host.take(saved) if self.offload else saved
        self.host.fetch(ctx.below)
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
