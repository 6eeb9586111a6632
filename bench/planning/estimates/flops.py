"""Model FLOPs of one training sample: what the model needs, without what an implementation adds.

A multiply-add counts as two operations. S tokens per sample, h hidden width, q width of Q (all heads), k width of K or
V, f width of the MLP, L layers, V vocabulary size:

| part                                       | weights                           | operations per token       |
| ------------------------------------------ | --------------------------------- | -------------------------- |
| qkv, proj, fc1 (2 f if gated), fc2         | L (h (q + 2 k) + q h + h f + f h) | 4 per weight, 6 if trained |
| output head                                | h V                               | 4 per weight, 6 if trained |
| adapters                                   | rank (inputs + outputs) of each   | 6 per weight               |
| causal attention, S / 2 keys for each query | none                             | 6 S q L                    |

With experts, fc1 and fc2 count once for each expert that a token is sent to, and the router counts, too.

A trained weight takes 2 operations forward and 4 backward (gradients of its input and of the weight). Under LoRA a
frozen weight has no gradient of its own, so it takes 2 backward. Attention takes 2 S q L forward and twice that
backward. Not counted: recomputation, evaluation, embedding look-up, norms, RoPE, activation function, softmax, loss,
optimizer.

For a model that transformers describes, the weights are those of its layers on the meta device (of experts the chosen
ones), and each layer has the width and the window of its attention; attention of other kinds is not counted.

NVIDIA's MLPerf configs give 421.59 TFLOP per sample for Llama 3.1 8B pre-training; this formula gives the same with a
vocabulary of 128,000. For llama2_70b_lora they give 2598 without saying how it is counted; this formula gives 2517.7.
"""

from bench.contract.model import Model
from bench.contract.schema import Config, Device, Precision
from bench.contract.training import Lora
from bench.planning.estimates.parameters import active_linear_weights, lora_parameters


def tflop_per_sample(model: Model, lora: Lora | None, *, seq_length: int, attention_share: float = 1.0) -> float:
    """Return the TFLOP (1e12 operations) of training on one sample, forward and backward.

    attention_share: with a document mask, the part of causal attention that it leaves (`documents.attention_share`).
    """
    weights = _layer_weights(model) + model.hidden_size * model.vocab_size
    per_token: float = (4 if lora else 6) * weights
    if lora:
        per_token += 6 * lora_parameters(model, lora)
    per_token += attention_share * _attention(model, seq_length)
    return per_token * seq_length / 1e12


def _layer_weights(model: Model) -> int:
    """Return the weights in the layers that a token is multiplied with."""
    if model.described is not None:
        return model.described.active_layer_weights
    return model.num_layers * active_linear_weights(model)


def _attention(model: Model, seq_length: int) -> float:
    """Return the operations of attention per token, forward and backward.

    Each query has 12 operations per key and element of its width. A query of a layer with a window of w keys sees
    w - w^2 / (2 S) keys on average.
    """
    if model.described is None:
        return 6 * seq_length * model.q_size * model.num_layers
    total = 0.0
    for layers in model.described.attention:
        window = min(layers.window or seq_length, seq_length)
        total += 12 * layers.num_layers * layers.width * (window - window**2 / (2 * seq_length))
    return total


def peak_tflops(config: Config) -> float | None:
    """Return the dense peak of one GPU in the precision of the layers; None if the cluster config has no such rate."""
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    if gpu is None:
        return None
    return {Precision.bf16: gpu.peak_bf16_tflops, Precision.fp8: gpu.peak_fp8_tflops}.get(config.precision)
