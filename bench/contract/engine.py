"""What trains or generates, and its settings."""

from dataclasses import dataclass
from enum import Enum


class Strategy(Enum):
    """How weights, gradients and optimizer states lie on the ranks."""

    ddp = "ddp"
    """Each rank holds all of them; gradients are summed by torch's DistributedDataParallel."""
    fsdp2 = "fsdp2"
    """Sharded over all ranks by torch's fully_shard; a layer's weights are gathered when it is at work."""
    fsdp2_hybrid = "fsdp2_hybrid"
    """Sharded over the ranks of a node; the nodes hold copies."""
    deepspeed = "deepspeed"
    """DeepSpeed's ZeRO, of stage zero_stage."""
    balanced = "balanced"
    """One process whose layers lie on all of a node's GPUs, one after the other: device_map="balanced"."""


class Attention(Enum):
    """transformers' attn_implementation. Which kernel sdpa then takes is in the log."""

    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"


class Bf16(Enum):
    """What precision=bf16 means; adapters' frozen base is in BF16 in each of them."""

    deepspeed = "deepspeed"
    """Weights and gradients in BF16; the optimizer holds FP32 master weights and moments."""
    autocast = "autocast"
    """Weights, gradients and moments in FP32; products in BF16 under autocast, or from FSDP2's gathered BF16 copies."""
    pure = "pure"
    """Weights, gradients and moments in BF16, without master weights."""


BF16_OF = {
    Strategy.ddp: Bf16.autocast,
    Strategy.fsdp2: Bf16.autocast,
    Strategy.fsdp2_hybrid: Bf16.autocast,
    Strategy.deepspeed: Bf16.deepspeed,
    Strategy.balanced: Bf16.pure,
}
"""What each strategy does unless it is told otherwise: Accelerate's and DeepSpeed's own ways."""
MOST_ZERO_STAGE = 3


@dataclass(slots=True, kw_only=True)
class HuggingFace:
    """Settings of engine=huggingface."""

    strategy: Strategy = Strategy.ddp
    zero_stage: int = 0
    """With strategy=deepspeed: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    num_gpus: int = 1
    """With strategy=balanced: over how many GPUs of the node the one process lays the layers."""
    offload_optimizer: bool = False
    """Master weights and moments in host memory, where the CPU updates them."""
    offload_parameters: bool = False
    """Weights in host memory until a layer needs them; with fsdp2 gradients and optimizer states too."""
    offload_activations: bool = False
    """What is stored for the backward pass lies in host memory until then."""
    attention: Attention = Attention.sdpa
    activation_checkpointing: bool | None = None
    """Compute each layer again in the backward pass. None: as recipe.recompute says; plan.recompute.full has it."""
    compile: bool = False
    """torch.compile, in the warm-up."""
    bf16: Bf16 | None = None
    """None: as the strategy does by itself, see `bf16_mode`."""
    deepspeed_json: str | None = None
    """A DeepSpeed file, or the name of one in conf/deepspeed. plan.deepspeed holds what DeepSpeed gets."""

    @property
    def bf16_mode(self) -> Bf16:
        """What precision=bf16 means here."""
        return self.bf16 or BF16_OF[self.strategy]

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only a shard of the weights."""
        is_zero_3 = self.strategy is Strategy.deepspeed and self.zero_stage == MOST_ZERO_STAGE
        return is_zero_3 or self.strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid)


NEMO, VERSION = "nemo-toolkit", "2.7.3"
"""The last NeMo with `nemo.collections.llm`, whose recipes are used."""


@dataclass(slots=True, kw_only=True)
class Nemo:
    """The environment in which NeMo's recipe trains; what NeMo requires does not go with the rest of this project."""

    python: str
    """The interpreter of the trials: the path of one, or `python`, that of the ranks: in an image that has NeMo."""
