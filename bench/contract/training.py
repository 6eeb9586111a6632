"""What a task trains, from where, until when, and by which recipe."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT
from bench.contract.local_sgd import LocalSgd

LORA_TARGETS = ("linear_qkv", "linear_proj")
"""The projections that the engine can put adapters on, by megatron-core's names."""


class Recompute(Enum):
    """Activations recomputed in the backward pass: none, every layer from its input, or as few as the plan needs."""

    none = "none"
    full = "full"
    fit = "fit"


class MomentPrecision(Enum):
    """How Adam's moments are stored; in bf16 they are rounded stochastically, so that small changes are not lost."""

    fp32 = "fp32"
    bf16 = "bf16"


class Trains(Enum):
    """Which weights are trained: adapters on a frozen base, adapters on a frozen 4-bit base, or the whole model."""

    lora = "lora"
    qlora = "qlora"
    all = "all"


class StartsFrom(Enum):
    """Where the first weights come from: a checkpoint of the site, what another task trains, or random numbers."""

    checkpoint = "checkpoint"
    task = "task"
    random = "random"


@dataclass(slots=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen projections: y = W x + alpha / rank * B A dropout(x)."""

    rank: int
    alpha: int
    dropout: float
    target_modules: list[str]


@dataclass(slots=True, kw_only=True)
class Training:
    """What a task trains, from where, and when it stops: at the target or after max_steps or epochs."""

    trains: Trains
    starts_from: StartsFrom
    base: str | None = None
    """For starts_from=task: the task whose checkpoint is fine-tuned."""
    lora: Lora | None = None
    """The adapters, where adapters are trained."""
    target_eval_loss: float | None = None
    """Mean cross-entropy (nats per token) at or below which the run stops; None: it trains for all of its steps."""
    max_steps: int | None = None
    epochs: int | None = None
    """Passes over the training rows, each without its incomplete last batch. Either this or max_steps is given."""
    checkpoint_every_steps: int | None = None
    """Save the training state after so many steps, and after the last one; an attempt that is cut short goes on from
    the newest checkpoint. None: nothing is saved. Not for a benchmark, whose rules know no resuming."""

    @property
    def has_target(self) -> bool:
        return self.target_eval_loss is not None

    def is_reached_by(self, eval_loss: float) -> bool:
        """Return whether an evaluation's mean cross-entropy (nats per token) ends the run; False without a target."""
        return self.target_eval_loss is not None and eval_loss <= self.target_eval_loss


@dataclass(slots=True, kw_only=True)
class Recipe:
    """How the model is trained. AdamW; the learning rate follows a cosine from lr to 0 at the last step."""

    global_batch_size: int
    micro_batch_size: int | None
    """Samples of one forward pass. None: the plan chooses what is fastest and fits a GPU; on CPUs a replica's whole
    share of the global batch."""
    lr: float
    lr_warmup_steps: int
    weight_decay: float
    clip_grad: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    eval_every_samples: int
    eval_skip: int | None = None
    """Evaluations left out at the start; None: by the official rule, FLOOR(0.125 * GBS + 2)."""
    warmup_iterations: int = 2
    """Steps and evaluations on synthetic data before run_start; they leave no trace in the weights."""
    log_every_steps: int = 10
    recompute: Recompute = Recompute.none
    moments: MomentPrecision = MomentPrecision.fp32
    offload_moments: bool = False
    """Keep Adam's moments in host memory; each step copies them to the GPU and back, which costs time."""
    offload_activations: bool = False
    """Keep the activations of some layers in host memory until the backward pass, instead of recomputing them: as few
    layers as memory needs with recompute=fit, and all of them with recompute=none."""
    local_sgd: LocalSgd = field(default_factory=LocalSgd, metadata=OMIT_DEFAULT)
    """How the groups of parallel.groups average their weights."""

    @property
    def averaging(self) -> LocalSgd | None:
        """The settings of local SGD; None where every step sums the gradients of all ranks."""
        return None if self.local_sgd.every_steps is None else self.local_sgd

    def micro_batch(self, dp: int) -> int:
        """Return the samples of one forward pass when dp replicas share the global batch; without a size, all."""
        return self.micro_batch_size or max(1, self.global_batch_size // dp)
