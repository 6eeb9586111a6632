"""Estimate the time of one optimizer step from measured rates, to compare layouts before anything runs.

GEMMs and attention run at the rates of `gpu.Rates`. Element-wise kernels run at the bandwidth that they reach:
each reads its inputs and writes its outputs once. Collectives run at the bus bandwidth for their message size. A step
is never faster than the host can launch its kernels. Nothing overlaps, with two exceptions: FP8 transposes weights
during its GEMMs, and the GEMM rate, which was measured in a step, includes that cost. And replicas exchange gradients
and weights while layers compute (`_Step.update`). Not counted: data loading, evaluation, embedding look-up (only
its gradient).
"""

import dataclasses
from dataclasses import dataclass

from bench.contract.buckets import bucket_size
from bench.contract.layers import Layer, has_fp8_head, layer_of
from bench.contract.plan import Cost, Recomputed, World
from bench.contract.schema import Config, Device, Precision, Rates
from bench.contract.training import Trains
from bench.planning.estimates import network
from bench.planning.estimates.activations import BYTES, layer_bytes
from bench.planning.estimates.memory import MAIN_GRADIENT_BYTES, MASTER_WEIGHT_BYTES, NF4_BYTES, moment_bytes
from bench.planning.estimates.memory_traffic import Traffic, backward_traffic, forward_traffic
from bench.planning.estimates.network import Collectives, hidden_bytes, rate_at
from bench.planning.estimates.parameters import (
    Linear,
    linear_weights,
    linears,
    lora_parameters,
    rank_parameters,
)
from bench.planning.parallelism import num_microbatches, tokens


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one part of a step, by kind of work."""

    gemm_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    communication_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.gemm_s + self.attention_s + self.elementwise_s + self.communication_s

    def __add__(self, other: "Work") -> "Work":
        return Work(
            gemm_s=self.gemm_s + other.gemm_s,
            attention_s=self.attention_s + other.attention_s,
            elementwise_s=self.elementwise_s + other.elementwise_s,
            communication_s=self.communication_s + other.communication_s,
        )

    def __mul__(self, count: float) -> "Work":
        return Work(
            gemm_s=count * self.gemm_s,
            attention_s=count * self.attention_s,
            elementwise_s=count * self.elementwise_s,
            communication_s=count * self.communication_s,
        )


FROZEN_FP8, FROZEN_FORWARD, FROZEN_ENDS = 70, 25, 28
"""Kernels of a layer with adapters, forward plus backward; those of them in the forward pass; and those of embedding,
last norm, head and loss in a micro-batch. Memsets of cuBLAS and cuDNN count.

Source: the profile docs/results/2026-11-22-studies/modules_lora_7b_fp8.json."""
FROZEN_BF16 = 64
"""The same, without quantizing the rows of an activation and a gradient and transposing four weights."""
DEQUANTIZE = 8
"""With a 4-bit base: four linears, each forward and backward."""
TRAINED_BF16, TRAINED_FORWARD, TRAINED_ENDS = 45, 15, 62
"""The same of a layer whose weights are trained. Source: modules_pretrain_7b_bf16.json in that folder."""
TRAINED_FP8 = 63
"""FP8 adds 3 quantizations, 4 transposed weights, and the transposed operands of 4 weight gradients with scales.
Counted by hand in jobs/engines/megatron/trained/ops.py."""
BIASES = 15
"""fc2's bias is added, and the gradients of four linears' biases (two sums each) and of two norms' to the FP32 ones.
Counted by hand in jobs/engines/megatron/trained/layer.py."""
RECOMPUTED_LINEAR = 3
"""Kernels of the forward pass from the norm to q, k and v, or to the activation; and of a memset."""
CP = 11
"""Host's time of the additional kernels with cp, in launches; one call launches several of them. Source: layers with
and without cp, docs/results/2026-11-26-four-gpus.md."""
TP_COLLECTIVES, SP_COLLECTIVES, CP_COLLECTIVES = 6, 10, 3
"""Collectives of a layer with tp, in addition with sp, and with cp, forward plus backward. Counted by hand in
jobs/engines/megatron/frozen/layer.py and attention.py."""
COLLECTIVE_LAUNCHES = 2.0
"""Host's time of a collective, with the code around it, in launches of a kernel. Source: layers with and without tp,
docs/results/2026-11-26-four-gpus.md."""
SHARED_LAUNCH_US = 85.0
"""Host's time of a launch where several ranks share the host: the mean with two and four ranks of H200 hosts, whose
sessions differ (67 to 96 us). Source: docs/results/2026-11-26-four-gpus.md. One rank alone has `Rates.launch_us`."""


def layer_collectives(world: World) -> int:
    """Return how many collectives a hand-written layer calls, forward and backward."""
    return TP_COLLECTIVES * (world.tp > 1) + SP_COLLECTIVES * world.sp + CP_COLLECTIVES * (world.cp > 1)


def layer_launches(config: Config, world: World) -> int:
    """Return how many launches a layer takes the host, forward and backward, without those of collectives.

    0 for megatron-core's layers, whose kernels were not counted.
    """
    layer, is_fp8 = layer_of(config), config.precision is Precision.fp8
    if layer is Layer.megatron:
        return 0
    if layer is Layer.trained:
        kernels = (TRAINED_FP8 if is_fp8 else TRAINED_BF16) + BIASES * config.model.bias
    else:
        kernels = FROZEN_FP8 if is_fp8 else FROZEN_BF16
        kernels += DEQUANTIZE * (config.training.trains is Trains.qlora)
    return kernels + CP * (world.cp > 1)


WAIT_SHARE = 0.06
"""Wait for the slowest rank as a share of the layer's compute time, if ranks communicate in every layer or micro-batch.

At the power limit each GPU runs at its own clock rate. Source: docs/results/2026-11-21-fp8-two-gpus.md, measured in
steps of Llama-2-70B on two GPUs with tp, cp or pp.
"""
SLOWED = 0.66
"""Seconds that computation loses for each second of an exchange between replicas that overlaps with it.

NCCL takes SMs and power. Source: docs/results/2026-11-26-several-gpus.md, 7B in BF16 on two H200s: of 84.2 ms of
exchange, of which 1.1 ms cannot be hidden, overlap saved 28.5 ms.
"""
RATE_TOKENS = 8192
"""Tokens of a micro-batch on one rank in the steps in which the GEMM rates were measured."""
DIGITS = 9
"""Decimal places of the seconds in a plan: rounding removes differences between C libraries' logarithms."""
HEAD_BYTES = 6
"""Per logit, in BF16: it is read once for the loss, then read again and overwritten by its gradient."""
FP8_HEAD_BYTES = 5
"""The same with a gradient in FP8."""
TRAINED_HEAD_BYTES = 24
"""Per weight of embedding and head, in BF16, and micro-batch: the gradient of each is written, read and added to the
FP32 one, of which the embedding's is first set to zero."""


NARROW_HEAD = 64
"""Heads of at most this size have a lower rate of attention, if it was measured."""

_GATHERED_BYTES = {Precision.fp8: 1, Precision.bf16: 2}
"""Per element that tensor-parallel ranks all-gather under sp; reductions are always in BF16."""


def estimate(config: Config, world: World, recomputed: Recomputed, *, is_captured: bool = False) -> Cost | None:
    """Return the time of a step; None if no rate is known for this GPU, for FP32 or for a link between its ranks.

    None also for a mixture of experts: no rate of megatron-core's MoE layer was measured.
    is_captured: the passes are launched as a CUDA graph, so that the GPU does not wait for the host.
    """
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    if gpu is None or gpu.rates is None or config.precision is Precision.fp32 or config.model.experts is not None:
        return None
    collectives = network.collectives(config, world, gpu.rates)
    if collectives is None:
        return None
    offloads = config.training_recipe.offload_moments or recomputed.offloaded_layers
    if offloads and gpu.rates.host_gbs is None:
        return None
    return _Step(config, world, gpu.rates, collectives, is_captured).cost(recomputed)


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step of a layout, on GPUs with these rates."""

    config: Config
    world: World
    rates: Rates
    collectives: Collectives
    is_captured: bool

    def cost(self, recomputed: Recomputed) -> Cost:
        """Return the seconds of the step for one pipeline stage; every micro-batch costs the same."""
        count, layers = num_microbatches(self.config, self.world), self.config.model.num_layers // self.world.pp
        forward, backward = self.layer_forward(), self.layer_backward()
        recompute_s = self.recompute_s(recomputed, layers)
        work = ((forward + backward) * layers + self.head() + self.pipeline_transfer()) * count
        work += self.update(layers * forward.total_s, layers * backward.total_s)
        layers_s = layers * (forward.total_s + backward.total_s) + recompute_s
        idle_microbatches = (self.world.pp - 1) / self.world.vpp  # while the pipeline fills and drains
        bubble_s = idle_microbatches * layers_s
        work += Work(elementwise_s=count * self.offload_s(recomputed, layers, forward, backward))
        step_s = work.total_s + count * recompute_s + bubble_s
        host_s = max(0.0, (count + idle_microbatches) * self.launch_s(layers, recomputed) - step_s)
        host_s = 0.0 if self.is_captured else host_s
        seconds = dataclasses.asdict(work) | {
            "recompute_s": count * recompute_s,
            "bubble_s": bubble_s,
            "host_s": host_s,
            "step_s": step_s + host_s,
        }
        return Cost(**{name: round(value, DIGITS) for name, value in seconds.items()})

    def layer_forward(self) -> Work:
        gathered, rates = _GATHERED_BYTES[self.config.precision], self.rates
        return self.with_waiting(
            Work(
                gemm_s=self.gemm_s(linear_weights(self.config.model)) + self.adapters_s(),
                attention_s=self.attention_s(rates.attention_forward_tflops, rates.attention_forward_4096_tflops)
                / self.narrow_heads(rates.narrow_heads_forward),
                elementwise_s=self.traffic_s(forward_traffic(self.config))
                + self.merge_s(backward=False)
                + self.dequantize_s(),
                communication_s=2 * self.collectives.around_linears_s(gathered) + self.collectives.keys_and_values_s(),
            )
        )

    def layer_backward(self) -> Work:
        """Return the backward pass of one layer; frozen weights have no gradient GEMM."""
        config, weights = self.config, linear_weights(self.config.model)
        gathered, rates = _GATHERED_BYTES[config.precision], self.rates
        return self.with_waiting(
            Work(
                gemm_s=self.gemm_s(weights) + self.weight_gradient_s(weights) + 2 * self.adapters_s(),
                attention_s=2.5
                * self.attention_s(rates.attention_backward_tflops, rates.attention_backward_4096_tflops)
                / self.narrow_heads(rates.narrow_heads_backward),
                elementwise_s=self.traffic_s(backward_traffic(config))
                + self.merge_s(backward=True)
                + self.transpose_s(weights)
                + self.dequantize_s(),
                communication_s=2 * self.collectives.around_linears_s(gathered)
                + 2 * self.collectives.keys_and_values_s(),
            )
        )

    def with_waiting(self, layer: Work) -> Work:
        """Return a layer's work and the wait for other ranks; pure data parallelism synchronizes only once a step."""
        if self.world.tp * self.world.cp * self.world.pp == 1:
            return layer
        return layer + Work(communication_s=WAIT_SHARE * (layer.total_s - layer.communication_s))

    def launch_s(self, layers: int, recomputed: Recomputed) -> float:
        """Return the seconds in which the host launches the kernels of a micro-batch; 0 if they were not counted.

        Collectives of recomputed layers are left out.
        """
        of_layer = layer_launches(self.config, self.world)
        if not of_layer:
            return 0.0
        is_trained = layer_of(self.config) is Layer.trained
        forward = TRAINED_FORWARD if is_trained else FROZEN_FORWARD
        launches = layers * (of_layer + COLLECTIVE_LAUNCHES * layer_collectives(self.world))
        linears_again = recomputed.qkv_layers + recomputed.fc1_layers
        launches += layers * forward if recomputed.full else RECOMPUTED_LINEAR * linears_again
        launches += TRAINED_ENDS if is_trained else FROZEN_ENDS
        launch_us = self.rates.launch_us
        if self.world.ranks_per_node > 1:
            launch_us = max(launch_us, SHARED_LAUNCH_US)
        return launches * launch_us / 1e6

    def recompute_s(self, recomputed: Recomputed, layers: int) -> float:
        """Return the seconds of recomputation per micro-batch; under sp the inputs are all-gathered again."""
        if recomputed.full:
            return layers * self.layer_forward().total_s
        traffic, projections = forward_traffic(self.config), linears(self.config.model)
        gather_s = self.collectives.gather_s(_GATHERED_BYTES[self.config.precision]) if self.world.sp else 0.0

        def linear_s(linear: Linear, per_number: float) -> float:
            elementwise_s = self.bytes_s(per_number * linear.num_out / self.world.tp)
            return self.with_waiting(Work(self.gemm_s(linear.weights), 0.0, elementwise_s, gather_s)).total_s

        qkv_s = linear_s(projections["linear_qkv"], traffic.qkv)
        fc1_s = linear_s(projections["linear_fc1"], traffic.fc1)
        return recomputed.qkv_layers * qkv_s + recomputed.fc1_layers * fc1_s

    def offload_s(self, recomputed: Recomputed, layers: int, forward: Work, backward: Work) -> float:
        """Return the seconds in which a micro-batch waits for activations that are copied to the host and back.

        Copies overlap with computation; only the excess is a wait.
        """
        if not recomputed.offloaded_layers:
            return 0.0
        assert self.rates.host_gbs is not None
        size = recomputed.offloaded_layers * layer_bytes(self.config, self.world) * tokens(self.config, self.world)
        copy_s = size / self.rates.host_gbs / 1e9
        return sum(max(0.0, copy_s - layers * one.total_s) for one in (forward, backward))

    def dequantize_s(self) -> float:
        """Return the seconds in which a pass reads a layer's 4-bit weights and writes them in BF16."""
        if self.config.training.trains is not Trains.qlora:
            return 0.0
        weights = linear_weights(self.config.model) / self.world.tp
        return (NF4_BYTES + BYTES[self.config.precision]) * weights / self.rates.kernel_gbs / 1e9

    def weight_gradient_s(self, weights: int) -> float:
        """Return the seconds of the GEMMs that add a micro-batch's gradients of trained weights to the FP32 ones.

        They take at least as long as reading and writing those; the measured rates include it.
        """
        if self.config.training.lora is not None:
            return 0.0
        added_s = 2 * MAIN_GRADIENT_BYTES * weights / self.world.tp / self.rates.copy_gbs / 1e9
        rate = self.rates.fp8_weight_gradient_tflops
        if self.config.precision is not Precision.fp8 or rate is None:
            return max(self.gemm_s(weights), added_s)
        return max(2 * tokens(self.config, self.world) * weights / self.world.tp / 1e12 / rate, added_s)

    def head(self) -> Work:
        """Return the work of logits, loss and their gradients; a trained head has one GEMM more."""
        config, is_fp8 = self.config, has_fp8_head(self.config)
        weights = config.model.vocab_size * config.model.hidden_size
        is_trained = config.training.lora is None
        per_logit = FP8_HEAD_BYTES if is_fp8 else HEAD_BYTES
        gradients = TRAINED_HEAD_BYTES * weights / self.world.tp if is_trained else 0
        return Work(
            gemm_s=(3 if is_trained else 2) * self.gemm_s(weights, Precision.fp8 if is_fp8 else Precision.bf16),
            elementwise_s=self.bytes_s(per_logit * config.model.vocab_size / self.world.tp)
            + gradients / self.rates.copy_gbs / 1e9,
        )

    def pipeline_transfer(self) -> Work:
        """Return the sends between stages per micro-batch: activations and their gradients, for each model chunk."""
        w = self.world
        if w.pp == 1:
            return Work()
        size = hidden_bytes(self.config, self.world, BYTES[self.config.precision]) / w.sequence_tp
        stride = w.ranks_per_node if w.num_nodes > 1 else w.num_ranks // w.pp  # each sender has one network card
        return Work(communication_s=2 * w.vpp * self.collectives.send_s(size, ranks=w.pp, stride=stride))

    def update(self, forward_s: float, backward_s: float) -> Work:
        """Return the work once per step: Adam, and the exchange of gradients and weights between the replicas.

        forward_s, backward_s: of the layers, in one micro-batch.
        """
        config, w = self.config, self.world
        base, adapters = rank_parameters(config.model, config.training.lora, tp=w.tp, pp=w.pp, pp_rank=w.pp - 1)
        trained, replicas = adapters if config.training.lora else base, w.dp * w.cp
        sharded = config.parallel.distributed_optimizer
        update_s = self.update_s(trained / replicas if sharded else trained, trained)
        if replicas == 1:
            return Work(elementwise_s=update_s)
        transfer_s = self.collectives.transfer_s(trained * MAIN_GRADIENT_BYTES, ranks=replicas, stride=w.tp)
        latency_s = self.collectives.latency_s(ranks=replicas, stride=w.tp)
        reduce_s = (1 if sharded else 2) * (transfer_s + latency_s)
        gather_s = BYTES[config.precision] / MAIN_GRADIENT_BYTES * transfer_s + latency_s if sharded else 0.0
        exchange_s = reduce_s + gather_s
        if config.parallel.overlap is not False:
            shown_reduce_s = reduce_s * self.last_bucket_share(trained, replicas)
            reduces_s = 0.0 if self.is_captured else backward_s
            gathers_s = update_s + (0.0 if self.is_captured else forward_s)
            hidden_s = min(reduce_s - shown_reduce_s, reduces_s) + min(gather_s, gathers_s)
            exchange_s += (SLOWED - 1) * hidden_s
        return Work(elementwise_s=update_s, communication_s=exchange_s)

    def last_bucket_share(self, trained: int, replicas: int) -> float:
        """Return the share of the gradients that are reduced last, when no layer computes: those of the embedding."""
        config, embedding = self.config, self.config.model.vocab_size * self.config.model.hidden_size // self.world.tp
        last = max(bucket_size(trained, replicas), 0 if config.training.lora else embedding)
        return min(1.0, last / trained)

    def update_s(self, updated: float, trained: int) -> float:
        """Return the seconds of an update: per trained parameter, its gradient is set to zero at the step's start.

        Per updated one, the norm reads the gradient; Adam reads it again, reads and writes the main weight and the
        moments, and writes the weight. Moments in the host's memory are copied meanwhile. Trained linears in FP8 are
        then quantized: read for the maximum, read again, and written.
        """
        config = self.config
        per_updated = 2 * MAIN_GRADIENT_BYTES + 2 * (MASTER_WEIGHT_BYTES + moment_bytes(config))
        size = (per_updated + BYTES[config.precision]) * updated + MAIN_GRADIENT_BYTES * trained
        if config.precision is Precision.fp8 and layer_of(config) is Layer.trained:
            layers = config.model.num_layers // self.world.pp
            size += (2 * BYTES[config.precision] + 1) * layers * linear_weights(config.model) / self.world.tp
        if not config.training_recipe.offload_moments:
            return size / self.rates.copy_gbs / 1e9
        assert self.rates.host_gbs is not None
        return size / self.rates.copy_gbs / 1e9 + moment_bytes(config) * updated / self.rates.host_gbs / 1e9

    def gemm_s(self, weights: int, precision: Precision | None = None) -> float:
        """Return the seconds of one GEMM of this rank's tokens with its share of these weights.

        The rate depends on the size of a whole layer; for the head, which passes a precision, on the size of its own
        GEMM.
        """
        per_weight = 2 * tokens(self.config, self.world) / self.world.tp
        size = per_weight * (weights if precision else linear_weights(self.config.model)) / 1e12
        is_fp8 = (precision or self.config.precision) is Precision.fp8
        rate = rate_at(size, self.rates.layer_tflop, self.rates.fp8_tflops if is_fp8 else self.rates.bf16_tflops)
        return per_weight * weights / 1e12 / rate

    def adapters_s(self) -> float:
        """Return the seconds of a forward pass's GEMMs of one layer's adapters, in BF16; a backward pass has twice."""
        config = self.config
        if (lora := config.training.lora) is None:
            return 0.0
        weights = lora_parameters(config.model, lora) // config.model.num_layers
        size = 2 * tokens(config, self.world) * linear_weights(config.model) / self.world.tp / 1e12
        rate = rate_at(size, self.rates.layer_tflop, self.rates.bf16_tflops)
        return 2 * tokens(config, self.world) * weights / self.world.tp / 1e12 / rate

    def attention_s(self, tflops: float, tflops_4096: float | None) -> float:
        """Return the seconds of one layer's causal attention forward; backward has 2.5 times the operations.

        With a document mask the time is the same: the kernel that attends within documents is slower, and its 25 % of
        the operations took as long as all of them (docs/results/2026-11-26-document-mask.md).
        """
        length = self.config.training_data.seq_length
        tflop = 2 * length * self.config.model.q_size * tokens(self.config, self.world) / self.world.tp / 1e12
        return tflop / rate_at(length, [4096, 8192], [tflops_4096 or tflops, tflops])

    def narrow_heads(self, share: float | None) -> float:
        """Return the rate of attention with this model's heads as a share of the rate with heads of 128 numbers."""
        return share if share is not None and self.config.model.head_size <= NARROW_HEAD else 1.0

    def merge_s(self, *, backward: bool) -> float:
        """Return the seconds in which context-parallel ranks split, concatenate and merge the chunks of attention.

        The bytes are counted by hand in jobs/engines/megatron/attention.py.
        """
        cp, model = self.world.cp, self.config.model
        if cp == 1:
            return 0.0
        share = 1 - 1 / (2 * cp)  # of the queries that also attend to keys of earlier chunks
        q, kv = (4 + 6 * share, 11 + 16 * cp) if backward else (4 + 30 * share, 4 + 4 * cp)
        return self.bytes_s((q * model.q_size + kv * 2 * model.kv_size) / self.world.tp)

    def transpose_s(self, weights: int) -> float:
        """Return the seconds in which FP8 transposes a layer's weights, without those that the GEMM rate includes.

        Each micro-batch transposes all weights once. The GEMM rate includes this for micro-batches of RATE_TOKENS; the
        fewer tokens a micro-batch has, the larger is the part that is missing in the rate.
        """
        if self.config.precision is not Precision.fp8:
            return 0.0
        missing = max(0.0, 1 - tokens(self.config, self.world) / RATE_TOKENS)
        return missing * 2 * weights / self.world.tp / self.rates.copy_gbs / 1e9

    def traffic_s(self, traffic: Traffic) -> float:
        """Return the seconds of a layer's element-wise kernels."""
        model, w, projections = self.config.model, self.world, linears(self.config.model)
        per_token = model.hidden_size * traffic.residual / w.sequence_tp + model.q_size * traffic.attention / w.tp
        per_token += traffic.qkv * projections["linear_qkv"].num_out / w.tp
        per_token += traffic.fc1 * projections["linear_fc1"].num_out / w.tp
        return self.bytes_s(per_token)

    def bytes_s(self, per_token: float) -> float:
        """Return the seconds in which kernels read or write so many bytes for every token of a micro-batch."""
        return per_token * tokens(self.config, self.world) / self.rates.kernel_gbs / 1e9
