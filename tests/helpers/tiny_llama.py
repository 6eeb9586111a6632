"""Tiny random models of transformers, as Hugging Face folders and converted checkpoints, with plans for generation."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from bench.contract import families
from bench.contract.checkpoint import Stored
from bench.contract.generation import Batching, Generation, Order, Sampling, WeightPrecision
from bench.contract.model import Activation, Model, Norm, Position
from jobs.weights import conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 512


def model(**changes: Any) -> Model:
    """Return a model of two layers with grouped queries; its heads are as small as attention kernels take them."""
    shape = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 192, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "max_seq_length": 131072, "norm_epsilon": 1e-5}
    parts = {"norm": Norm.RMSNorm, "activation": Activation.swiglu, "position": Position.rope}
    return Model(**{"name": "tiny", "source": "made here"} | shape | heads | parts | changes)


def theirs(model: Model) -> "PreTrainedModel":
    """Return transformers' model of this shape, in FP32, with random weights, norms and biases.

    BF16 holds its weights exactly. They are large enough for tokens that do not repeat themselves at once.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = families.of_model(model).config_of(model) | {"initializer_range": 0.15}
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    for name, weight in built.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            weight.data.uniform_(-1, 1)
        weight.data.copy_(weight.data.bfloat16())
    return built


def write(folder: Path, model: Model, *, stored: tuple[Stored, ...] = (Stored.plain,)) -> "PreTrainedModel":
    """Write a random model in FP32 with its conversions, and return transformers' own."""
    built = theirs(model)
    built.save_pretrained(folder)
    for one in stored:
        conversion.convert(conversion.prepare(folder, model, stored=one))
    return built


@dataclass(frozen=True)
class GenerationOptions:
    """Generation settings of a plan."""

    weights: WeightPrecision = WeightPrecision.fp32
    order: Order = Order.side_by_side
    batching: Batching = Batching.static
    max_batch: int | None = None
    sampling: Sampling = field(default_factory=Sampling)


def plan(model: Model, options: GenerationOptions) -> Any:
    """Return as much of a plan as a generator reads."""
    block_options = {name: getattr(options, name) for name in ("order", "batching", "max_batch", "sampling")}
    block = Generation(question="", lengths=[1], prompt_tokens=1, **block_options)
    config = SimpleNamespace(model=model, task=SimpleNamespace(generation=block))
    return SimpleNamespace(config=config, weights=options.weights)


def as_json(model: Model) -> Any:
    """Return a model as JSON has it, for `codec.typed`."""
    return json.loads(json.dumps(asdict(model), default=lambda value: value.name))
