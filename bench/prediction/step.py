"""Predict the seconds of one optimizer step of a layout, term by term.

A step is m micro-batches on the slowest pipeline stage, the pipeline's fill and drain, and work once per step:

    step = (m * stage + (pp - 1) / vpp * stage) * wait + sends + gradients + update

Computation takes the rates of `conf/gpu`, as the estimate of runstop's own engine. The rest follows from the links.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from statistics import NormalDist

from bench.contract.model import Activation, Model
from bench.contract.schema import Rates
from bench.planning.estimates.memory_traffic import Traffic, bytes_per_token
from bench.planning.estimates.network import rate_at
from bench.planning.estimates.parameters import EXPERT_LINEARS, active_linear_weights, linear_weights, linears
from bench.planning.kernels import BACKWARD
from bench.prediction.network import Links, all_gather_s, all_reduce_s, all_to_all_s, send_s
from bench.prediction.stacks import CALIBRATION_GPUS, SPREAD, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is split over GPUs. Ranks are numbered over tp first, then cp, dp and pp.

    ep ranks, which hold different experts, are a part of the cp and dp ranks.
    """

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int = 1
    vpp: int = 1
    micro_batch_size: int = 1
    global_batch_size: int
    seq_length: int
    balances_ends: bool = False
    """Embedding and head each count as a layer when layers are split over stages."""
    recompute: bool = False
    """Each layer runs forward again before its backward pass."""
    recompute_attention: bool = False
    """Only attention runs forward again."""
    graphs: bool = True
    """CUDA graphs: the host launches no single kernels."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.seq_length / self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOfKind:
    """Attention with heads of 64 numbers, in which every second layer may have a window."""

    narrow_share: float
    """Its rate as a share of the rate with heads of 128 numbers."""
    window_share: float
    """Seconds of a layer with a window of 128 keys, relative to one without, with rows of 8192 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, on what, by what."""

    model: Model
    rates: Rates
    gpu: str
    links: Links
    stack: Stack
    gemm_start_s: float = 0.0
    """Of a GEMM, in addition to its operations by the rate: its start, and the end in which SMs run dry."""
    is_fp8: bool = True
    fp4_tflops: float | None = None
    """Rate of the GEMMs of linear layers in NVFP4; None: FP8 or BF16. Everything else stays as with FP8."""
    attention_of_kind: AttentionOfKind | None = None
    """Attention of heads and windows like gpt-oss's; None: the model has none."""
    adapter_weights: int = 0
    """Parameters of LoRA's adapters; 0: all weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of a step on the slowest stage, by what takes them.

    With LoRA, what its adapters add is in GEMMs, attention and element-wise kernels: each is multiplied by a factor.
    """

    gemm_s: float
    attention_s: float
    elementwise_s: float
    recompute_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    expert_parallel_s: float
    """All-to-all exchanges of tokens between the ranks that hold different experts."""
    head_s: float
    """Logits and loss, where they are not hidden by an earlier stage's layers."""
    host_s: float
    """The wait for kernel launches."""
    bubble_s: float
    wait_s: float
    """The wait for the slowest GPU."""
    sends_s: float
    gradients_s: float
    """Reduction of gradients and gathering of parameters over the replicas."""
    update_s: float

    @property
    def step_s(self) -> float:
        return _sum(self)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds of one layer and micro-batch, forward and backward together."""

    gemm_s: float
    attention_s: float
    elementwise_s: float
    recompute_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    expert_parallel_s: float

    @property
    def total_s(self) -> float:
        return _sum(self)


def _sum(seconds: _Layer | Terms) -> float:
    return math.fsum(getattr(seconds, one.name) for one in fields(seconds))


GRADIENT_ADD_BYTES = 8
"""Per weight: a weight gradient is added to an FP32 buffer, which is read and written."""


def predict(work: Work, layout: Layout) -> Terms:
    """Return the seconds of one optimizer step."""
    model, m = work.model, layout.num_microbatches
    layer = _layer(work, layout)
    extra = 2 if layout.balances_ends and layout.pp > 1 else 0
    num_layers = (model.num_layers + extra) / layout.pp
    stage_s, head_s = num_layers * layer.total_s, _head_s(work, layout)
    last_s = stage_s + head_s - (layer.total_s if extra else 0.0)
    shown_head_s = max(0.0, last_s - stage_s)
    slowest_s = stage_s + shown_head_s
    host_s = 0.0 if layout.graphs else num_layers * work.stack.kernels * work.rates.launch_us / 1e6
    host_wait_s = max(0.0, host_s - slowest_s)
    bubble_s = (layout.pp - 1) / layout.vpp * (slowest_s + host_wait_s)
    busy_s = m * (slowest_s + host_wait_s) + bubble_s
    return Terms(
        **{one.name: m * num_layers * getattr(layer, one.name) for one in fields(layer)},
        head_s=m * shown_head_s,
        host_s=m * host_wait_s,
        bubble_s=bubble_s,
        wait_s=busy_s * max(0.0, slowest_of(layout.num_gpus) / slowest_of(CALIBRATION_GPUS) - 1),
        sends_s=_sends_s(work, layout, slowest_s),
        **_once_per_step(work, layout, num_layers),
    )


@lru_cache(maxsize=4096)
def slowest_of(num_gpus: int) -> float:
    """Return the expected seconds of the slowest of n GPUs relative to the mean GPU.

    Source: Blom, 1958: the expected maximum of n normal values, by quantiles.
    """
    return 1 + SPREAD * NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25)) if num_gpus > 1 else 1.0


def _layer(work: Work, layout: Layout) -> _Layer:
    """Return the seconds of one layer: computation by the rates, and communication that computation does not hide."""
    stack, tokens = work.stack, layout.tokens
    is_lora = work.adapter_weights > 0
    factor = stack.adapter_factors[work.gpu].value if is_lora and work.gpu in stack.adapter_factors else 1.0
    forward_gemm_s, backward_gemm_s = _gemms_s(work, layout, is_lora=is_lora)
    forward_attention_s, backward_attention_s = _attention_s(work, layout)
    forward_kernels_s, backward_kernels_s = _elementwise_s(work, layout)
    hidden, group = work.model.hidden_size * tokens, work.links.group(layout.tp, 1)
    shown = stack.shown_tensor_share.value
    one_gather_s = shown * all_gather_s(stack.gathered_bytes * hidden, group, work.links)
    one_reduce_s = shown * all_gather_s(2 * hidden, group, work.links)
    forward_tensor_s = 2 * (one_gather_s + one_reduce_s)
    backward_tensor_s = forward_tensor_s + (0.0 if is_lora else 2 * one_gather_s)  # inputs, for weight gradients
    keys_s = _keys_and_values_s(work, layout)
    attention_again_s = factor * forward_attention_s if layout.recompute_attention else 0.0
    again_s = factor * (forward_gemm_s + forward_attention_s + forward_kernels_s) + forward_tensor_s + keys_s
    dispatch_s = _dispatch_s(work, layout)
    again_s += dispatch_s
    return _Layer(
        gemm_s=factor * (forward_gemm_s + backward_gemm_s),
        attention_s=factor * (forward_attention_s + backward_attention_s),
        elementwise_s=factor * (forward_kernels_s + backward_kernels_s),
        recompute_s=again_s if layout.recompute else attention_again_s,
        tensor_parallel_s=forward_tensor_s + backward_tensor_s,
        context_parallel_s=3 * keys_s,  # keys and values forward; both and their gradients backward
        expert_parallel_s=2 * dispatch_s,
    )


def _gemms_s(work: Work, layout: Layout, *, is_lora: bool) -> tuple[float, float]:
    """Return the seconds of a layer's GEMMs, forward and backward; weight gradients only where weights are trained."""
    model, rates = work.model, work.rates
    held, used = held_weights(model, layout) / layout.tp, active_linear_weights(model) / layout.tp
    tflop = 2 * layout.tokens * used / 1e12
    rate = rate_at(tflop, rates.layer_tflop, rates.fp8_tflops if work.is_fp8 else rates.bf16_tflops)
    of_rate_s = tflop / (work.fp4_tflops or rate)
    start_s = len(linears(model)) * work.gemm_start_s
    forward_s = of_rate_s + start_s
    if is_lora:
        return forward_s, forward_s
    slow = rates.fp8_weight_gradient_tflops if work.is_fp8 and work.fp4_tflops is None else None
    added_s = GRADIENT_ADD_BYTES * held / rates.copy_gbs / 1e9
    return forward_s, forward_s + max(added_s, of_rate_s if slow is None else tflop / slow) + start_s


def held_weights(model: Model, layout: Layout) -> float:
    """Return the weights of a layer's linears that a rank holds without tp; ep ranks hold different experts."""
    return linear_weights(model) - (1 - 1 / layout.ep) * _expert_weights(model)


def _expert_weights(model: Model) -> int:
    """Return the weights of all experts of a layer."""
    if model.experts is None:
        return 0
    return model.experts.num_experts * sum(linears(model)[name].weights for name in EXPERT_LINEARS)


def _dispatch_s(work: Work, layout: Layout) -> float:
    """Return the seconds in which tokens are sent to their experts and back, in BF16, once each.

    Each token is sent to all of its experts; all experts get equally many tokens. Nothing hides the exchange.
    """
    experts = work.model.experts
    if experts is None or layout.ep == 1:
        return 0.0
    size = 2 * experts.experts_per_token * work.model.hidden_size * layout.tokens / layout.tp
    return 2 * all_to_all_s(size, work.links.group(layout.ep, layout.tp), work.links)


def _attention_s(work: Work, layout: Layout) -> tuple[float, float]:
    """Return the seconds of a layer's causal attention, forward and backward.

    CP ranks have equal shares (zig-zag). A rank attends to one block of keys after the other, each as long as its own
    rows, and merges the results; the rate is that of rows of this length.
    """
    rates, length = work.rates, layout.seq_length / layout.cp
    tflop = 2 * layout.seq_length * work.model.q_size * layout.tokens / layout.tp / 1e12
    forward, backward = rates.attention_forward_tflops, rates.attention_backward_tflops
    shorter = rates.attention_forward_4096_tflops or forward, rates.attention_backward_4096_tflops or backward
    merge_forward_s, merge_backward_s = _merge_s(work, layout)
    if (kind := work.attention_of_kind) is not None:
        of_layers = (1 + kind.window_share) / 2 if work.model.sliding_window else 1.0
        tflop *= of_layers / kind.narrow_share
    return (
        tflop / rate_at(length, [4096, 8192], [shorter[0], forward]) + merge_forward_s,
        BACKWARD * tflop / rate_at(length, [4096, 8192], [shorter[1], backward]) + merge_backward_s,
    )


def _merge_s(work: Work, layout: Layout) -> tuple[float, float]:
    """Return the seconds in which a CP rank splits, concatenates and merges blocks, forward and backward.

    The bytes are those of runstop's own attention with CP (bench/planning/estimates/step_time.py, merge_s).
    """
    cp, model = layout.cp, work.model
    if cp == 1:
        return 0.0, 0.0
    share = 1 - 1 / (2 * cp)  # of the queries that also attend to keys of earlier chunks
    per_second = layout.tokens / layout.tp / work.rates.kernel_gbs / 1e9
    forward = (4 + 30 * share) * model.q_size + (4 + 4 * cp) * 2 * model.kv_size
    backward = (4 + 6 * share) * model.q_size + (11 + 16 * cp) * 2 * model.kv_size
    return forward * per_second, backward * per_second


def _elementwise_s(work: Work, layout: Layout) -> tuple[float, float]:
    """Return the seconds of a layer's element-wise kernels; TP splits all of them (sequence parallelism)."""
    model, stack = work.model, work.stack
    forward, backward = stack.forward, stack.backward
    if model.activation is Activation.gelu:
        forward, backward = (
            replace(one, fc1=fc1) for one, fc1 in zip((forward, backward), stack.gelu_fc1, strict=True)
        )
    if model.experts is not None:
        forward, backward = (_with_experts(one, model.experts.experts_per_token) for one in (forward, backward))
    per_byte_s = layout.tokens / layout.tp / work.rates.kernel_gbs / 1e9
    return bytes_per_token(model, forward) * per_byte_s, bytes_per_token(model, backward) * per_byte_s


def _with_experts(traffic: Traffic, experts_per_token: int) -> Traffic:
    """Return the traffic of a layer with experts: each token has several rows there, copied to them and summed again.

    Per element of the hidden state in BF16: read and written once as the layer has it, and once for each expert, both
    when the rows are sorted by expert and when they are put back.
    """
    copied = 4 + 4 * experts_per_token
    return replace(traffic, residual=traffic.residual + copied, fc1=traffic.fc1 * experts_per_token)


def _keys_and_values_s(work: Work, layout: Layout) -> float:
    """Return the seconds in which CP ranks pass keys and values around once."""
    size = 2 * 2 * work.model.kv_size / layout.tp * layout.tokens * layout.cp
    return all_gather_s(size, work.links.group(layout.cp, layout.tp), work.links)


def _head_s(work: Work, layout: Layout) -> float:
    """Return the seconds of logits, loss and their gradients, in BF16; a frozen head has no weight gradient."""
    model, rates = work.model, work.rates
    tflop = 2 * layout.tokens * model.hidden_size * model.vocab_size / layout.tp / 1e12
    gemms = 2 if work.adapter_weights else 3
    loss_s = work.stack.head_bytes * model.vocab_size * layout.tokens / layout.tp / rates.kernel_gbs / 1e9
    return gemms * tflop / rates.bf16_tflops[-1] + loss_s


def _sends_s(work: Work, layout: Layout, stage_s: float) -> float:
    """Return the seconds of sends between stages that computation does not hide.

    While the pipeline fills and drains, each hop waits. Otherwise sends overlap with the computation of another
    micro-batch if there are chunks to interleave (vpp > 1), unless they take longer; with vpp = 1 they are not hidden.
    """
    if layout.pp == 1:
        return 0.0
    size = 2 * work.model.hidden_size * layout.tokens / layout.tp
    stride = layout.tp * layout.cp * layout.dp
    one_s = send_s(size, work.links.group(layout.pp, stride), work.links)
    steady_s = 2 * layout.vpp * one_s  # of a micro-batch: activations and gradients, once a chunk
    waiting_s = steady_s if layout.vpp == 1 else max(0.0, steady_s - stage_s)
    return 2 * (layout.pp - 1) * one_s + layout.num_microbatches * waiting_s


def _once_per_step(work: Work, layout: Layout, num_layers: float) -> dict[str, float]:
    """Return the seconds of gradients, parameters and Adam; the optimizer's states are split over all replicas.

    Collectives of the replicas count as not hidden: they start behind the last micro-batch of a chunk, and what they
    overlap with slows down.
    """
    model, stack, replicas = work.model, work.stack, layout.dp * layout.cp
    embedding = model.hidden_size * model.vocab_size
    held = num_layers * held_weights(model, layout) + embedding * (2 if layout.pp == 1 else 1)
    experts = num_layers * _expert_weights(model) / layout.ep
    trained, of_experts = (work.adapter_weights or held - experts) / layout.tp, experts / layout.tp
    if work.adapter_weights:
        of_experts = 0.0
    group = work.links.group(replicas, layout.tp)
    same_experts = work.links.group(replicas // layout.ep, layout.tp * layout.ep)
    gradients_s = 0.0
    for size in (stack.gradient_bytes, stack.parameter_bytes):
        gradients_s += all_gather_s(size * trained, group, work.links)
        gradients_s += all_gather_s(size * of_experts, same_experts, work.links) if of_experts else 0.0
    if model.tied_embeddings and layout.pp > 1:
        ends = work.links.group(2, layout.num_gpus // 2)
        gradients_s += all_reduce_s(stack.gradient_bytes * embedding / layout.tp, ends, work.links)
    updated = (trained + layout.ep * of_experts) / replicas
    update_s = stack.update_bytes * updated / work.rates.copy_gbs / 1e9
    return {"gradients_s": gradients_s, "update_s": update_s}
