"""Settings of the engine that trains or generates."""

from dataclasses import dataclass
from enum import Enum


class Strategy(Enum):
    """How weights, gradients and optimizer states are distributed over the ranks."""

    ddp = "ddp"
    """Replicated on each rank; torch's DistributedDataParallel reduces the gradients."""
    fsdp2 = "fsdp2"
    """Sharded over all ranks by torch's fully_shard; a layer's weights are gathered while it runs."""
    fsdp2_hybrid = "fsdp2_hybrid"
    """Sharded over the ranks of a node, replicated over nodes."""
    deepspeed = "deepspeed"
    """DeepSpeed ZeRO with stage zero_stage."""
    balanced = "balanced"
    """One process with the layers distributed over the node's GPUs: device_map="balanced"."""


class Attention(Enum):
    """transformers' attn_implementation. The log shows which kernel sdpa uses."""

    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"


class Bf16(Enum):
    """The meaning of precision=bf16; the frozen base of adapters is always in BF16."""

    deepspeed = "deepspeed"
    """Weights and gradients in BF16; the optimizer holds FP32 master weights and moments."""
    autocast = "autocast"
    """Weights, gradients and moments in FP32; GEMMs in BF16 under autocast, or from FSDP2's gathered BF16 copies."""
    pure = "pure"
    """Weights, gradients and moments in BF16. Only DeepSpeed has master weights, which are in BF16, too; it needs
    zero_stage 1 to 3 for this."""


BF16_OF = {
    Strategy.ddp: Bf16.autocast,
    Strategy.fsdp2: Bf16.autocast,
    Strategy.fsdp2_hybrid: Bf16.autocast,
    Strategy.deepspeed: Bf16.deepspeed,
    Strategy.balanced: Bf16.pure,
}
"""The default of each strategy, as in Accelerate and DeepSpeed."""
MOST_ZERO_STAGE = 3


@dataclass(slots=True, kw_only=True)
class HuggingFace:
    """Settings of engine=huggingface."""

    strategy: Strategy = Strategy.ddp
    zero_stage: int = 0
    """With strategy=deepspeed: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    num_gpus: int = 1
    """With strategy=balanced: the number of GPUs for the layers."""
    offload_optimizer: bool = False
    """Keep master weights and moments in host memory; the CPU updates them."""
    offload_parameters: bool = False
    """Keep weights in host memory until a layer needs them; with fsdp2 also gradients and optimizer states."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass."""
    attention: Attention = Attention.sdpa
    activation_checkpointing: bool | None = None
    """Recompute each layer in the backward pass. None: follow recipe.recompute. plan.recompute.full has the result."""
    compile: bool = False
    """Use torch.compile; compilation happens in the warm-up."""
    bf16: Bf16 | None = None
    """None: the strategy's default, see `bf16_mode`."""
    deepspeed_json: str | None = None
    """A DeepSpeed file, or the name of one in conf/deepspeed. plan.deepspeed has the final settings."""

    @property
    def bf16_mode(self) -> Bf16:
        """The BF16 mode, with the strategy's default."""
        return self.bf16 or BF16_OF[self.strategy]

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only a shard of the weights."""
        is_zero_3 = self.strategy is Strategy.deepspeed and self.zero_stage == MOST_ZERO_STAGE
        return is_zero_3 or self.strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid)


NEMO, VERSION = "nemo-toolkit", "2.7.3"
"""The last NeMo with `nemo.collections.llm`, whose recipes the engine uses."""


@dataclass(slots=True, kw_only=True)
class Nemo:
    """The Python environment of NeMo, which is separate because its requirements conflict with this project's."""

    python: str
    """The interpreter of the trials: an absolute path, or `python` in an image with NeMo."""
