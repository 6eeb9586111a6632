"""Memory for training the Llama 2 models: published figures, simple arithmetic, and the estimates of this project.

Published: Run:ai, "Throughput Performance Benchmarking: Pre-Training Foundational Large Language Models on Kubernetes",
2024, "LLMs don't fit into a single GPU". It states neither what is counted nor the batch size.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.contract.schema import Config, Precision
from bench.contract.training import Lora, MomentPrecision, Trains
from bench.errors import ConfigError
from bench.planning.estimates import memory
from bench.planning.estimates.memory import EVERYTHING, GIB
from bench.planning.parallelism import check, divisors, split

MODELS = ("llama2_7b", "llama2_13b", "llama2_70b")
CAPACITIES = {40: 39.4, 80: 79.6, 141: 139.8}
"""GB in a GPU's name, and the GiB that CUDA reports: of an A100 40 GB, of conf/gpu/h100.yaml and of h200.yaml."""
MOST_GPUS = 64
PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published figures for a model in a precision, in GB; for GPUs of 40 GB."""

    weights_gb: float
    training_gb: float
    num_gpus: int


NUMBER_BYTES = {"FP32": 4, "FP16": 2, "INT8": 1}
PUBLISHED = {
    ("llama2_7b", "FP32"): Published(weights_gb=28, training_gb=98, num_gpus=4),
    ("llama2_13b", "FP32"): Published(weights_gb=52, training_gb=192, num_gpus=8),
    ("llama2_70b", "FP32"): Published(weights_gb=280, training_gb=1000, num_gpus=32),
    ("llama2_7b", "FP16"): Published(weights_gb=14, training_gb=49, num_gpus=2),
    ("llama2_13b", "FP16"): Published(weights_gb=26, training_gb=96, num_gpus=4),
    ("llama2_70b", "FP16"): Published(weights_gb=140, training_gb=512, num_gpus=16),
    ("llama2_7b", "INT8"): Published(weights_gb=7, training_gb=25, num_gpus=1),
    ("llama2_13b", "INT8"): Published(weights_gb=13, training_gb=48, num_gpus=2),
    ("llama2_70b", "INT8"): Published(weights_gb=70, training_gb=256, num_gpus=8),
}
STATES = 4
"""Elements per weight in training: the weight, its gradient, and Adam's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The same by simple arithmetic: every state of a weight has this precision."""

    weights_gb: float
    training_gb: float
    num_gpus: dict[int, int]
    """By GPU size in GB."""


def counted(parameters: int, precision: str) -> Counted:
    """Return the memory of so many parameters, divided evenly over a power of two of GPUs."""
    weights_gb = parameters * NUMBER_BYTES[precision] / 1e9
    gpus = {capacity: _power_of_two(STATES * weights_gb / capacity) for capacity in CAPACITIES}
    return Counted(weights_gb=weights_gb, training_gb=STATES * weights_gb, num_gpus=gpus)


def _power_of_two(least: float) -> int:
    power = math.ceil(math.log2(max(1.0, least)))
    return 1 << power


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way in which the engine trains a model."""

    name: str
    precision: Precision
    trains: Trains = Trains.all
    moments: MomentPrecision = MomentPrecision.fp32


WAYS = (
    Way(name="all weights, FP32", precision=Precision.fp32),
    Way(name="all weights, BF16", precision=Precision.bf16),
    Way(name="all weights, BF16, moments in BF16", precision=Precision.bf16, moments=MomentPrecision.bf16),
    Way(name="all weights, FP8 GEMMs", precision=Precision.fp8),
    Way(name="LoRA, BF16", precision=Precision.bf16, trains=Trains.lora),
    Way(name="LoRA, FP8", precision=Precision.fp8, trains=Trains.lora),
    Way(name="LoRA, 4-bit base", precision=Precision.bf16, trains=Trains.qlora),
)
LORA = Lora(rank=64, alpha=16, dropout=0.1, target_modules=["linear_qkv", "linear_proj"])
"""As in conf/task/lora_7b.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Estimate for rows of 4096 tokens, one per micro-batch, with full recomputation."""

    one_gpu_gib: float
    """Memory on a single GPU, if it were large enough."""
    num_gpus: dict[int, int | None]
    """Fewest GPUs (a power of two) by GPU size in GB, with the smallest split; None: more than MOST_GPUS."""


def planned(config: Config, way: Way) -> Planned:
    """Return the estimates of the plan for this config."""
    needed_gib = {num_gpus: _least_gib(_config(config, way, num_gpus)) for num_gpus in _gpu_counts()}
    gpus = {
        capacity: next((count for count, gib in needed_gib.items() if gib <= usable_gib), None)
        for capacity, usable_gib in CAPACITIES.items()
    }
    return Planned(one_gpu_gib=needed_gib[1], num_gpus=gpus)


def _gpu_counts() -> list[int]:
    return divisors(MOST_GPUS)


def _config(config: Config, way: Way, num_gpus: int) -> Config:
    lora = None if way.trains is Trains.all else LORA
    training = replace(config.training, trains=way.trains, lora=lora)
    per_node = min(num_gpus, PER_NODE)
    return replace(
        config,
        task=replace(config.task, training=training),
        recipe=replace(config.training_recipe, global_batch_size=MOST_GPUS, micro_batch_size=1, moments=way.moments),
        cluster=replace(config.cluster, num_nodes=num_gpus // per_node, ranks_per_node=per_node),
        precision=way.precision,
    )


def _least_gib(config: Config) -> float:
    """Return the memory of a GPU in the legal split that needs least."""
    return min(_split_gib(config))


def _split_gib(config: Config) -> Iterator[float]:
    num_gpus = config.cluster.num_nodes * config.cluster.ranks_per_node
    for tp, pp in itertools.product(divisors(num_gpus), divisors(num_gpus)):
        if num_gpus % (tp * pp) == 0:
            world = split(config, tp=tp, pp=pp, cp=1, sp=tp > 1)
            try:
                check(config, world)
            except ConfigError:
                continue
            yield memory.estimate(config, world, EVERYTHING).total_gib


def states_gb(config: Config, way: Way) -> float:
    """Return the GB of weights, gradients and optimizer states on one GPU, without activations."""
    alone = _config(config, way, 1)
    estimated = memory.estimate(alone, split(alone, tp=1, pp=1, cp=1, sp=False), EVERYTHING)
    weights_gib = estimated.base_weights_gib + estimated.adapter_weights_gib
    return (weights_gib + estimated.gradients_gib + estimated.optimizer_gib) * GIB / 1e9
