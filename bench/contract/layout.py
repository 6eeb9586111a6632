"""How a plan lays a model out over ranks, and what that costs: the split, the time of a step, and the memory."""

from dataclasses import dataclass, field

from bench.contract.codec import LEFT_OUT_IF_NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How the ranks are split: num_ranks = dp * tp * pp * cp, and times groups where groups train apart."""

    num_nodes: int
    ranks_per_node: int
    num_ranks: int
    dp: int
    tp: int
    pp: int
    cp: int
    vpp: int
    sp: bool
    groups: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """How many groups of consecutive ranks train apart, each split in this way; None: all ranks train together."""

    @property
    def sequence_tp(self) -> int:
        """Over how many TP ranks norms, residuals and dropout are split."""
        return self.tp if self.sp else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one optimizer step on the slowest pipeline stage, and what they go into."""

    gemm_s: float
    attention_s: float
    elementwise_s: float
    communication_s: float
    """With what ranks wait in it for each other."""
    recompute_s: float
    """All of what is computed again, its communication included."""
    bubble_s: float
    """A pipeline filling and draining."""
    host_s: float
    """What the GPU waits for the host, where that needs longer to launch kernels than they run. Counted in FP8 only."""
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What the backward pass of every rank recomputes: whole layers, or the outputs of qkv or fc1 in some layers."""

    full: bool
    qkv_layers: int
    fc1_layers: int
    offloaded_layers: int = 0
    """How many layers of a rank keep what they save for the backward pass in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one GPU of the fullest pipeline stage needs and has; None where there is no GPU."""

    base_weights_gib: float
    """The model itself, which LoRA freezes."""
    adapter_weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float
    total_gib: float
    capacity_gib: float | None
    fits: bool | None
    parameters: int
    """Of the whole model with its adapters, each counted once."""
    trainable_parameters: int
    rank_parameters: int
    rank_trainable_parameters: int
