"""Estimate the GPU memory of a server: weights, and the KV cache of the requests that the loads have at the same time.

The estimate is a lower bound: what a server stores beyond it differs between servers, such as CUDA graphs and the
temporary tensors of several prompts at once.
"""

import math
from bisect import bisect_right
from heapq import nlargest
from itertools import accumulate

from bench.contract.model import Activation, Model
from bench.contract.schema import Config, Device, Precision
from bench.contract.serving import Arrivals, Load, SampledLengths, Serving, ServingMemory, lengths_of
from bench.planning.estimates.memory import CUDA_ALLOWANCE_GIB, GIB, gpu
from bench.planning.estimates.parameters import weight_bytes

BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 2}
"""Bytes of an element of the KV cache, of activations, embedding and head."""
LINEAR_BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 1}
LOGIT_BYTES = 4
"""Logits are sampled in FP32."""


def estimate(
    config: Config, serving: Serving, loads: list[Load], lengths: SampledLengths | None = None
) -> ServingMemory:
    """Return the memory of one of the tp GPUs of the server.

    If lengths differ between requests, the concurrent requests are the longest ones of the trial that needs most.
    """
    tp, size, device = config.parallel.tp or 1, BYTES[config.precision], gpu(config)
    sizes = {"linear_bytes": LINEAR_BYTES[config.precision], "other_bytes": size}
    weights_gib = weight_bytes(config.model, shards=tp, **sizes) / GIB
    workspace_gib = _workspace_bytes(config, _longest_prompt(serving, lengths), tp) / GIB
    token_gib = token_bytes(config.model, tp=tp, element_bytes=size) / GIB
    most, fitting = max(concurrent(load, serving) for load in loads), None
    tokens = _most_tokens(serving, lengths, most)
    request_gib = tokens[0] * token_gib
    fraction = serving.server.memory_fraction
    if device is not None:
        room_gib = fraction * device.memory_gib - weights_gib - workspace_gib
        fitting = bisect_right(tokens, room_gib / token_gib)
    num_held = most if fitting is None else fitting
    kv_cache_gib = tokens[num_held - 1] * token_gib if num_held else 0.0
    return ServingMemory(
        weights_gib=weights_gib,
        workspace_gib=workspace_gib,
        request_gib=request_gib,
        concurrent=most,
        kv_cache_gib=kv_cache_gib,
        total_gib=weights_gib + workspace_gib + kv_cache_gib,
        capacity_gib=device.memory_gib if device else None,
        fraction=fraction,
        fitting=fitting,
        longest_gib=None if lengths is None else tokens[-1] * token_gib,
    )


def _most_tokens(serving: Serving, lengths: SampledLengths | None, most: int) -> list[int]:
    """Return the most tokens that 1, 2, … `most` requests of a trial can have together."""
    every = [
        lengths_of(serving, lengths, trial).totals for trial in range(1 if lengths is None else len(lengths.trials))
    ]
    of_trials = [accumulate(nlargest(most, totals)) for totals in every]
    return [max(sums) for sums in zip(*of_trials, strict=True)]


def _longest_prompt(serving: Serving, lengths: SampledLengths | None) -> int:
    return serving.tokens_in if lengths is None else max(max(trial.tokens_in) for trial in lengths.trials)


def token_bytes(model: Model, *, tp: int, element_bytes: int) -> int:
    """Return the KV cache of one token on one GPU, of all layers.

    If there are more GPUs than KV heads, each GPU has a copy of one head.
    """
    head_dim = model.head_size
    return model.num_layers * 2 * math.ceil(model.num_query_groups / tp) * head_dim * element_bytes


def concurrent(load: Load, serving: Serving) -> int:
    """Return how many requests a load has at the same time, if the server meets the latency limit.

    A Poisson load has rate x latency requests on average (Little's law).
    """
    if load.arrivals is Arrivals.one_by_one:
        return 1
    if load.concurrency is not None:
        return load.concurrency
    if load.rate is None or serving.limits.latency_s is None:
        return load.requests
    return min(load.requests, max(1, math.ceil(load.rate * serving.limits.latency_s)))


def _workspace_bytes(config: Config, tokens_in: int, tp: int) -> float:
    """Return the bytes of temporary tensors of one prompt in the MLP, or of its logits, and of CUDA."""
    model, size = config.model, BYTES[config.precision]
    gates = 3 if model.activation is Activation.swiglu else 2
    mlp = tokens_in * (gates * model.ffn_hidden_size / tp + 4 * model.hidden_size) * size
    own = CUDA_ALLOWANCE_GIB * GIB if config.cluster.device is Device.cuda else 0
    return own + max(mlp, LOGIT_BYTES * model.vocab_size)
