"""What transformers says about a model that no file of runstop describes. Standard library only: ranks import it.

`python -m jobs.engines.huggingface.described.describe` writes it: counts are from the model on the meta device,
activations from a probe.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.errors import ConfigError

FAMILY = "transformers"
"""The name of the family in `Model.family`."""


NOT_COMPARED = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures")
"""Keys of config.json that do not change what the model computes in a plan."""


@dataclass(slots=True, kw_only=True)
class AttentionLayers:
    """Layers whose attention has the same size."""

    num_layers: int
    width: int
    """Query heads x size of a head."""
    window: int | None = None
    """Number of keys that a query sees at most; None: all before it."""


@dataclass(slots=True, kw_only=True)
class Projections:
    """The linear layers of the decoder that have the same name."""

    name: str
    """The last part of their names, such as q_proj; PEFT's target_modules."""
    num_modules: int
    weights: int
    """Elements of all their matrices."""
    sides: int
    """Sum of their inputs and outputs: elements of their adapters of rank 1."""
    largest_side: int
    is_attention: bool
    is_output: bool
    """Whether it is the last projection of an attention or of an MLP, which returns to the residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How the layers compute in the plan for which they are probed."""

    attention: str
    """transformers' attn_implementation."""
    trained: str
    """Data type of trained weights, by torch's name."""
    frozen: str
    """Data type of the base under adapters."""
    is_autocast: bool
    """Whether GEMMs run in BF16 under autocast."""
    lora_rank: int = 0
    """0: all weights are trained."""
    lora_dropout: float = 0.0
    lora_modules: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Probe:
    """Bytes that autograd stores for the backward pass, measured with one copy of each kind of layer on a CPU.

    A layer stores tokens x (bytes_per_token + bytes_per_key x tokens of a row): the mean over the layers.
    """

    bytes_per_token: float
    bytes_per_key: float
    """Per token and per key of its row; 0 if no tensor grows with the square of a row."""
    bytes_per_logit: float
    """Stored per logit between the last layer and the loss."""
    num_kinds: int
    """Different kinds of layers; one of each was run."""
    tokens: int
    """Length of the probed row."""
    scaled: str | None = None
    """What was made smaller to fit this machine, or None: the probed layers had their real sizes."""


@dataclass(slots=True, kw_only=True)
class Described:
    """A causal language model of transformers."""

    config_json: str
    """config.json on one line, from which the ranks build the model."""
    transformers: str
    """Version of the library that described it."""
    architecture: str
    layer: str
    """Class of the decoder layers."""
    parameters: int
    active_parameters: int
    """Those that a token uses: of experts, only the chosen ones."""
    largest_parameter: int
    layer_weights: int
    """Elements of all matrices in the decoder layers: projections and experts."""
    active_layer_weights: int
    kv_width: int
    """Elements of keys and values of one token, over all layers. 0: not known."""
    num_uncounted_layers: int
    """Layers whose attention config.json does not describe (such as linear attention): its operations are not
    counted."""
    attention: list[AttentionLayers]
    projections: list[Projections]
    attention_implementations: list[str]
    """The values of engine.huggingface.attention with which the model computes what it should."""
    can_recompute: bool
    """Whether transformers can recompute its layers."""
    ignores_tensors: bool = False
    """Whether folders of the model may have tensors that transformers does not load."""
    is_mxfp4: bool = False
    """Whether its experts are stored in MXFP4; they are dequantised on load."""
    probe: Probe | None = None
    """None where no activations are estimated, as in generation."""

    def adapter_parameters(self, rank: int, modules: tuple[str, ...]) -> int:
        """Return the elements of adapters of this rank on all linear layers with these names."""
        return sum(rank * one.sides for one in self.projections if one.name in modules)


def require_same(config: Mapping[str, Any], described: Described, *, where: str) -> None:
    """Refuse a config.json that is not the one of the plan.

    Raises:
        ConfigError: a key differs.
    """
    planned = json.loads(described.config_json)
    keys = sorted({*planned, *config} - {*NOT_COMPARED})
    if differences := [
        f"{key} is {config.get(key)}, but {planned.get(key)} in the plan"
        for key in keys
        if config.get(key) != planned.get(key)
    ]:
        raise ConfigError(
            f"config.json differs from the plan: {'; '.join(differences[:3])}",
            where=where,
            fix="set MODEL to the folder of the model that was planned, or start a new run with this folder",
            rule="CFG-06",
        )
