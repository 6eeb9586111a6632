"""Estimate the GPU memory of a server: weights, and the KV cache of the requests that the loads have at the same time.

The estimate is a lower bound: what a server stores beyond it differs between servers, such as CUDA graphs and the
temporary tensors of several prompts at once.
"""

import math

from bench.contract.model import Activation, Model
from bench.contract.schema import Config, Device, Precision
from bench.contract.serving import Arrivals, Load, Serving, ServingMemory, total_tokens
from bench.planning.estimates.memory import CUDA_ALLOWANCE_GIB, GIB, gpu
from bench.planning.estimates.parameters import weight_bytes

BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 2}
"""Bytes of an element of the KV cache, of activations, embedding and head."""
LINEAR_BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 1}
LOGIT_BYTES = 4
"""Logits are sampled in FP32."""


def estimate(config: Config, serving: Serving, loads: list[Load]) -> ServingMemory:
    """Return the memory of one of the tp GPUs of the server."""
    tp, size, device = config.parallel.tp or 1, BYTES[config.precision], gpu(config)
    sizes = {"linear_bytes": LINEAR_BYTES[config.precision], "other_bytes": size}
    weights_gib = weight_bytes(config.model, shards=tp, **sizes) / GIB
    workspace_gib = _workspace_bytes(config, serving, tp) / GIB
    request_gib = total_tokens(serving) * token_bytes(config.model, tp=tp, element_bytes=size) / GIB
    most, fitting = max(concurrent(load, serving) for load in loads), None
    fraction = serving.server.memory_fraction
    if device is not None:
        room_gib = fraction * device.memory_gib - weights_gib - workspace_gib
        fitting = min(most, max(0, math.floor(room_gib / request_gib)))
    kv_cache_gib = request_gib * (most if fitting is None else fitting)
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
    )


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


def _workspace_bytes(config: Config, serving: Serving, tp: int) -> float:
    """Return the bytes of temporary tensors of one prompt in the MLP, or of its logits, and of CUDA."""
    model, size = config.model, BYTES[config.precision]
    gates = 3 if model.activation is Activation.swiglu else 2
    mlp = serving.tokens_in * (gates * model.ffn_hidden_size / tp + 4 * model.hidden_size) * size
    own = CUDA_ALLOWANCE_GIB * GIB if config.cluster.device is Device.cuda else 0
    return own + max(mlp, LOGIT_BYTES * model.vocab_size)
