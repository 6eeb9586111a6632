"""Settings of training: the trained weights, the start, the end, and the recipe."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT
from bench.contract.local_sgd import LocalSgd

LORA_TARGETS = ("linear_qkv", "linear_proj")
"""The projections that support adapters with a shared A, by megatron-core's names."""
PEFT_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The linear layers of transformers' Llama that form each projection of megatron-core."""


class Recompute(Enum):
    """Activation recomputation: none, full (every layer from its input), or fit (as little as memory allows)."""

    none = "none"
    full = "full"
    fit = "fit"


class MomentPrecision(Enum):
    """Storage of Adam's moments; bf16 uses stochastic rounding, so that small changes are not lost."""

    fp32 = "fp32"
    bf16 = "bf16"


class Trains(Enum):
    """Which weights are trained: adapters on a frozen base, adapters on a frozen 4-bit base, or the whole model."""

    lora = "lora"
    qlora = "qlora"
    all = "all"


class StartsFrom(Enum):
    """The initial weights: a checkpoint of the site, the result of another task, random, or what a program chooses."""

    checkpoint = "checkpoint"
    task = "task"
    random = "random"
    program = "program"


@dataclass(slots=True, kw_only=True)
class Lora:
    """Low-rank adapters on frozen projections: y = W x + alpha / rank * B A dropout(x)."""

    rank: int
    alpha: int
    dropout: float
    target_modules: list[str]
    """megatron-core's names; with separate matrices A also PEFT's, such as q_proj."""
    shared_a: bool = field(default=True, metadata=OMIT_DEFAULT)
    """Whether q, k and v of a layer share one matrix A, as in megatron-core. False: each linear layer of target_modules
    has its own A, as in PEFT."""

    @property
    def peft_modules(self) -> tuple[str, ...]:
        """The linear layers with an adapter, by PEFT's names."""
        names = (name for module in self.target_modules for name in PEFT_MODULES.get(module, (module,)))
        return tuple(dict.fromkeys(names))


@dataclass(slots=True, kw_only=True)
class Training:
    """The trained weights, their start, and the end of training: the target, max_steps or epochs."""

    trains: Trains
    starts_from: StartsFrom
    base: str | None = None
    """For starts_from=task: the task that trains the initial checkpoint."""
    lora: Lora | None = None
    """The adapters, for trains=lora and qlora."""
    target_eval_loss: float | None = None
    """Mean cross-entropy (nats per token) at or below which the run stops; None: no target, all steps are trained."""
    max_steps: int | None = None
    epochs: int | None = None
    """Passes over the training rows, each without its incomplete last batch. Set either this or max_steps."""
    checkpoint_every_steps: int | None = None
    """Save the training state after so many steps, and after the last one; an interrupted trial resumes from the
    newest checkpoint. None: nothing is saved. Not for benchmarks, whose rules do not allow resuming."""

    @property
    def has_target(self) -> bool:
        return self.target_eval_loss is not None

    def is_reached_by(self, eval_loss: float) -> bool:
        """Return whether an evaluation loss (mean cross-entropy, nats per token) reaches the target."""
        return self.target_eval_loss is not None and eval_loss <= self.target_eval_loss


@dataclass(slots=True, kw_only=True)
class ReferencePoint:
    """The learning rate and warm-up by which a benchmark's reference trains at one global batch size."""

    global_batch_size: int
    lr: float
    lr_warmup_samples: int


@dataclass(slots=True, kw_only=True)
class Recipe:
    """The training recipe. AdamW; after the warm-up, the learning rate decays by a cosine until the last step."""

    global_batch_size: int
    micro_batch_size: int | None
    """Samples of one forward pass. None: the plan chooses the fastest that fits the GPU; on CPUs a replica's whole
    share of the global batch."""
    lr: float
    lr_warmup_steps: int
    weight_decay: float
    clip_grad: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    eval_every_samples: int
    lr_min_factor: float = field(default=0.0, metadata=OMIT_DEFAULT)
    """The learning rate of the last step, as a share of lr."""
    reference_points: list[ReferencePoint] | None = field(default=None, metadata=OMIT_DEFAULT)
    """If lr or lr_warmup_steps is not set: their values, by the global batch size. None in a plan."""
    eval_skip: int | None = None
    """Evaluations skipped at the start; None: by the rules of the benchmark (llama2_70b_lora without a benchmark)."""
    warmup_iterations: int = 2
    """Steps and evaluations on synthetic data before run_start; they do not change the weights."""
    log_every_steps: int = 10
    recompute: Recompute = Recompute.none
    cuda_graph: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """Whether a CUDA graph launches the kernels of a micro-batch. None: if the GPU would wait for the host."""
    moments: MomentPrecision = MomentPrecision.fp32
    offload_moments: bool = False
    """Keep Adam's moments in host memory; each step copies them to the GPU and back."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass instead of recomputing them: of as few layers as possible
    with recompute=fit, of all layers with recompute=none."""
    local_sgd: LocalSgd = field(default_factory=LocalSgd, metadata=OMIT_DEFAULT)
    """How the groups of parallel.groups average their weights."""

    @property
    def averaging(self) -> LocalSgd | None:
        """The settings of local SGD; None without local SGD."""
        return None if self.local_sgd.every_steps is None else self.local_sgd

    def micro_batch(self, dp: int) -> int:
        """Return the samples of one forward pass with dp replicas; by default the whole share of a replica."""
        return self.micro_batch_size or max(1, self.global_batch_size // dp)
