"""How long one optimizer step takes: an estimate from measured rates, to compare layouts by before anything runs.

Products and attention at the rates of `schema.Rates`; everything element by element at the rate of device memory,
one pass of each kernel over what it reads and writes; collectives at the bus bandwidth of their size; but no step is
faster than the host launches its kernels. Nothing is assumed to overlap but what FP8 does beside its products: it transposes
weights there, and the products' rate, measured in a step, has its cost. Left out: data loading, evaluation, the embedding's
look-up.
"""

import dataclasses
import math
from dataclasses import dataclass

from bench.contract.plan import Cost, Recomputed, World
from bench.contract.schema import Config, Device, Precision, Rates
from bench.planning.activations import BYTES
from bench.planning.memory import ADAM_BYTES, MAIN_GRADIENT_BYTES
from bench.planning.parallelism import num_microbatches, tokens
from bench.planning.parameters import Linear, kv_size, linear_weights, linears, rank_parameters

MIB = 2**20
WAITED = 0.06
"""Of a layer's own time, what ranks which exchange in each layer or micro-batch wait for the slower one: at the power limit each GPU has
a speed of its own at any moment. Source: docs/results/2026-11-21-fp8-two-gpus.md, in a step of Llama-2-70B on two GPUs with tp, cp or pp.
"""
RATE_TOKENS = 8192
"""Of a micro-batch on one rank, in the steps that the rates of products come from."""
LAUNCHES, TP_LAUNCHES, SP_LAUNCHES, CP_LAUNCHES = 80, 6, 10, 46
"""Kernels of an FP8 layer, forward and backward, and what tp, sp and cp add. Source: profiles of docs/results/2026-11-22-fp8.md; collectives of tp and sp
by hand, in jobs/engines/megatron/fp8/layer.py.
"""
DIGITS = 9
"""Of the seconds in a plan, which is then the same whichever C library computed its logarithms."""
HEAD_BYTES = 6
"""Per logit, in BF16: read once, then read and overwritten by its gradient."""
UPDATE_BYTES = 2 * ADAM_BYTES + MAIN_GRADIENT_BYTES + 2
"""Per parameter that Adam updates: main weight and moments read and written, its gradient read, its BF16 copy written."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of a part of a step."""

    gemm_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    communication_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.gemm_s + self.attention_s + self.elementwise_s + self.communication_s

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: float) -> "_Work":
        return _Work(*(times * seconds for seconds in dataclasses.astuple(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """Bytes of device memory that a layer's kernels read and write per token, beside its products and attention.

    hidden and its_own: per hidden number, split over tp with sp or always; qkv and fc1: per number of their outputs.
    """

    hidden: int
    its_own: int
    qkv: float
    fc1: float


_FORWARD = {
    # hidden: norm 3, A 1, B added 4, add and norm 7, add 6; its_own: quantise 3, A 2; qkv: B added and rope 4; fc1: SwiGLU
    Precision.fp8: _Traffic(hidden=21, its_own=5, qkv=4, fc1=4.5),
    # hidden: norms 8, adds 12, dropout and A 7, B scaled and added 12; its_own: dropout and A 7; qkv: B 12, rope 14; fc1: SwiGLU
    Precision.bf16: _Traffic(hidden=39, its_own=7, qkv=26, fc1=3),
}
_BACKWARD = {
    # hidden: quantise 3, norms 17, B 4, A 3; its_own: A 2, added 4; qkv: rope 5, B 4; fc1: SwiGLU
    Precision.fp8: _Traffic(hidden=27, its_own=6, qkv=9, fc1=4.5),
    # hidden: norms 12, adds 12, A and dropout 15, B 6; its_own: A and dropout 15; qkv: rope 14, cut and joined 4, B 6; fc1: SwiGLU
    Precision.bf16: _Traffic(hidden=45, its_own=15, qkv=24, fc1=5),
}
"""Counted by hand in the layers of jobs/engines/megatron, with LoRA on qkv and proj: fused kernels in FP8, plain torch in BF16 but for SwiGLU.

FP8's SwiGLU reads its row twice, the second time mostly from the cache: 4.5 is what its time in a step comes to.
"""
_GATHERED_BYTES = {Precision.fp8: 1, Precision.bf16: 2}
"""Of a number that tensor-parallel ranks gather under sp; what they sum is in BF16."""


def estimate(config: Config, world: World, recomputed: Recomputed) -> Cost | None:
    """Return what a step costs; None where rates were not measured: of this GPU, in FP32, or between these nodes."""
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    if gpu is None or gpu.rates is None or config.precision is Precision.fp32:
        return None
    if world.num_nodes > 1 and config.cluster.network_gbs is None:
        return None
    return _Step(config, world, gpu.rates).cost(recomputed)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a layout on GPUs of these rates."""

    config: Config
    world: World
    rates: Rates

    def cost(self, recomputed: Recomputed) -> Cost:
        count, layers = num_microbatches(self.config, self.world), self.config.model.num_layers // self.world.pp
        forward, backward = self.layer_forward(), self.layer_backward()
        again_s = self.recomputed_s(recomputed, layers)
        work = ((forward + backward) * layers + self.head() + self.hand_over()) * count + self.update()
        layers_s = layers * (forward.total_s + backward.total_s) + again_s
        waited = (self.world.pp - 1) / self.world.vpp  # of micro-batches, while a pipeline fills and drains
        bubble_s = waited * layers_s
        step_s = work.total_s + count * again_s + bubble_s
        host_s = max(0.0, (count + waited) * self.launch_s(layers) - step_s)
        seconds = dataclasses.asdict(work) | {
            "recompute_s": count * again_s,
            "bubble_s": bubble_s,
            "host_s": host_s,
            "step_s": step_s + host_s,
        }
        return Cost(**{name: round(value, DIGITS) for name, value in seconds.items()})

    def layer_forward(self) -> _Work:
        gathered = _GATHERED_BYTES[self.config.precision]
        return self.waited(
            _Work(
                gemm_s=self.gemm_s(linear_weights(self.config.model)),
                attention_s=self.attention_s(self.rates.attention_forward_tflops),
                elementwise_s=self.traffic_s(_FORWARD[self.config.precision]) + self.merging_s(backward=False),
                communication_s=2 * self.tp_exchange_s(gathered) + self.kv_exchange_s(),
            )
        )

    def layer_backward(self) -> _Work:
        """Return the backward pass of one layer; frozen weights take no gradients."""
        config, weights = self.config, linear_weights(self.config.model)
        gathered = _GATHERED_BYTES[config.precision]
        return self.waited(
            _Work(
                gemm_s=(1 if config.task.training.lora else 2) * self.gemm_s(weights),
                attention_s=2.5 * self.attention_s(self.rates.attention_backward_tflops),
                elementwise_s=self.traffic_s(_BACKWARD[config.precision])
                + self.merging_s(backward=True)
                + self.transposing_s(weights),
                communication_s=2 * self.tp_exchange_s(gathered) + 2 * self.kv_exchange_s(),
            )
        )

    def waited(self, layer: _Work) -> _Work:
        """Return a layer's work with what its rank waits for others; replicas meet once a step only."""
        if self.world.tp * self.world.cp * self.world.pp == 1:
            return layer
        return layer + _Work(communication_s=WAITED * (layer.total_s - layer.communication_s))

    def launch_s(self, layers: int) -> float:
        """Return what the host needs to launch so many layers forward and backward; what is recomputed is not counted."""
        if self.config.precision is not Precision.fp8:
            return 0.0
        w = self.world
        kernels = LAUNCHES + TP_LAUNCHES * (w.tp > 1) + SP_LAUNCHES * w.sp + CP_LAUNCHES * (w.cp > 1)
        return layers * kernels * self.rates.launch_us / 1e6

    def recomputed_s(self, recomputed: Recomputed, layers: int) -> float:
        """Return the seconds per micro-batch of what is computed again, inputs gathered again where sp has cut them."""
        if recomputed.full:
            return layers * self.layer_forward().total_s
        traffic, projections = _FORWARD[self.config.precision], linears(self.config.model)
        gather_s = self.gather_s(_GATHERED_BYTES[self.config.precision]) if self.world.sp else 0.0

        def again_s(linear: Linear, per_number: float) -> float:
            elementwise_s = self.bytes_s(per_number * linear.num_out / self.world.tp)
            return self.waited(_Work(self.gemm_s(linear.weights), 0.0, elementwise_s, gather_s)).total_s

        qkv_s = again_s(projections["linear_qkv"], traffic.qkv)
        fc1_s = again_s(projections["linear_fc1"], traffic.fc1)
        return recomputed.qkv_layers * qkv_s + recomputed.fc1_layers * fc1_s

    def head(self) -> _Work:
        """Return the logits, the loss and their gradients, in BF16; with one product more where the head is trained."""
        config = self.config
        weights = config.model.vocab_size * config.model.hidden_size
        products = 2 if config.task.training.lora else 3
        return _Work(
            gemm_s=products * self.gemm_s(weights, Precision.bf16),
            elementwise_s=self.bytes_s(HEAD_BYTES * config.model.vocab_size / self.world.tp),
        )

    def hand_over(self) -> _Work:
        """Return what a stage waits for the next one per micro-batch: activations forward, gradients backward, of each chunk."""
        w = self.world
        if w.pp == 1:
            return _Work()
        size = self.hidden_bytes(BYTES[self.config.precision]) / w.sequence_tp
        apart = w.ranks_per_node if w.num_nodes > 1 else w.num_ranks // w.pp  # one sender has one network card
        return _Work(communication_s=2 * w.vpp * size / self.bandwidth(size, ranks=w.pp, apart=apart))

    def update(self) -> _Work:
        """Return what comes once a step: gradients summed over the replicas, and Adam."""
        config, w = self.config, self.world
        base, adapters = rank_parameters(config.model, config.task.training.lora, tp=w.tp, pp=w.pp, pp_rank=w.pp - 1)
        trained, replicas = adapters if config.task.training.lora else base, w.dp * w.cp
        sharded = config.parallel.distributed_optimizer
        size = trained * MAIN_GRADIENT_BYTES
        back = BYTES[config.precision] if sharded else MAIN_GRADIENT_BYTES  # updated weights, or the sums
        sent_s = (1 + back / MAIN_GRADIENT_BYTES) * self.pass_s(size, ranks=replicas, apart=w.tp)
        updated = trained / replicas if sharded else trained
        return _Work(elementwise_s=UPDATE_BYTES * updated / self.rates.copy_gbs / 1e9, communication_s=sent_s)

    def gemm_s(self, weights: int, precision: Precision | None = None) -> float:
        """Return the seconds of one product of this rank's tokens with its share of so many weights.

        Rates are those of a whole layer of this size: the layer's for its own products, the product's own for the head.
        """
        per_weight = 2 * tokens(self.config, self.world) / self.world.tp
        size = per_weight * (weights if precision else linear_weights(self.config.model)) / 1e12
        is_fp8 = (precision or self.config.precision) is Precision.fp8
        rate = at(size, self.rates.layer_tflop, self.rates.fp8_tflops if is_fp8 else self.rates.bf16_tflops)
        return per_weight * weights / 1e12 / rate

    def attention_s(self, rate_tflops: float) -> float:
        """Return the seconds of one layer's causal attention forward at a rate; backward has 2.5 times the operations."""
        tflop = 2 * self.config.data.seq_length * self.hidden_bytes(1) / self.world.tp / 1e12
        return tflop / rate_tflops

    def merging_s(self, *, backward: bool) -> float:
        """Return the seconds in which context-parallel ranks cut, join and merge attention's parts: bytes counted in jobs/engines/megatron/attention.py."""
        cp, model = self.world.cp, self.config.model
        if cp == 1:
            return 0.0
        late = 1 - 1 / (2 * cp)  # of the queries: those with keys before their own chunk
        hidden, kv = (4 + 6 * late, 11 + 16 * cp) if backward else (4 + 30 * late, 4 + 4 * cp)
        return self.bytes_s((hidden * model.hidden_size + kv * 2 * kv_size(model)) / self.world.tp)

    def transposing_s(self, weights: int) -> float:
        """Return the seconds in which FP8 transposes a layer's weights, less those that the products' rate has in it.

        Each micro-batch transposes all of them; the rate is that of a micro-batch of RATE_TOKENS, which a part of a row is not.
        """
        if self.config.precision is not Precision.fp8:
            return 0.0
        missing = max(0.0, 1 - tokens(self.config, self.world) / RATE_TOKENS)
        return missing * 2 * weights / self.world.tp / self.rates.copy_gbs / 1e9

    def traffic_s(self, traffic: _Traffic) -> float:
        model, w, projections = self.config.model, self.world, linears(self.config.model)
        per_token = model.hidden_size * (traffic.hidden / w.sequence_tp + traffic.its_own / w.tp)
        per_token += traffic.qkv * projections["linear_qkv"].num_out / w.tp
        per_token += traffic.fc1 * projections["linear_fc1"].num_out / w.tp
        return self.bytes_s(per_token)

    def bytes_s(self, per_token: float) -> float:
        """Return the seconds that so many bytes per token take to be read or written."""
        return per_token * tokens(self.config, self.world) / self.rates.copy_gbs / 1e9

    def hidden_bytes(self, size: int) -> float:
        """Return the hidden numbers of a micro-batch on this rank, of so many bytes each."""
        return size * self.config.model.hidden_size * tokens(self.config, self.world)

    def tp_exchange_s(self, gathered: int) -> float:
        """Return the seconds between one pair of linears: inputs gathered and outputs scattered under sp, else all-reduced."""
        return self.gather_s(gathered if self.world.sp else 2) + self.gather_s(2)

    def gather_s(self, size: int) -> float:
        return self.pass_s(self.hidden_bytes(size), ranks=self.world.tp, apart=1)

    def kv_exchange_s(self) -> float:
        """Return the seconds in which context-parallel ranks gather keys and values of the whole sequence, or sum their gradients."""
        size = 2 * 2 * kv_size(self.config.model) / self.world.tp * tokens(self.config, self.world) * self.world.cp
        return self.pass_s(size, ranks=self.world.cp, apart=self.world.tp)

    def pass_s(self, size: float, *, ranks: int, apart: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes in all; an all-reduce is both."""
        return (ranks - 1) / ranks * size / self.bandwidth(size, ranks=ranks, apart=apart) if ranks > 1 else 0.0

    def bandwidth(self, size: float, *, ranks: int, apart: int) -> float:
        """Return the bus bandwidth, in bytes/s, of a group of ranks that are `apart` from each other: tp, then cp, dp, pp.

        Between nodes it is that of the group's ranks in one node together, each with a network card of its own.
        """
        bandwidth_gbs = at(size / MIB, self.rates.busbw_mib, self.rates.busbw_gbs)
        in_node = max(1, self.world.ranks_per_node // apart)
        if ranks > in_node:
            assert self.config.cluster.network_gbs is not None
            bandwidth_gbs = min(bandwidth_gbs, self.config.cluster.network_gbs * in_node)
        return bandwidth_gbs * 1e9


def at(size: float, sizes: list[float], rates: list[float]) -> float:
    """Return the rate at a size, straight lines between the measured ones where both axes are logarithmic.

    Below the smallest size the first line goes on; above the largest nothing is gained.
    """
    if size >= sizes[-1] or len(sizes) == 1:
        return rates[-1]
    right = next((i for i in range(1, len(sizes)) if size <= sizes[i]), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = math.log(size / low) / math.log(high / low)
    return rates[right - 1] * math.exp(share * math.log(rates[right] / rates[right - 1]))
