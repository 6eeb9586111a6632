"""A model family: what its config.json means, and how its tensors are called in transformers and in megatron-core."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.contract.model import Model
from bench.contract.schema import EngineName
from bench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """The content of a config.json; a key with the value null counts as missing."""

    values: Mapping[str, Any]
    where: str
    """Its path, for errors."""

    def count(self, key: str, default: int | None = None) -> int:
        """Return a number of layers, heads, tokens …

        Raises:
            ConfigError: it is missing and has no default, or is not a whole number of 1 or more.
        """
        value = default if self.values.get(key) is None else self.values[key]
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "a whole number of 1 or more")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a positive number; raises as `count`."""
        value = default if self.values.get(key) is None else self.values[key]
        if type(value) not in (int, float) or not value > 0:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; raises as `count`."""
        value = default if self.values.get(key) is None else self.values[key]
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> ConfigError:
        state = "is missing" if value is None else f"is {json.dumps(value)[:80]}"
        return ConfigError(
            f"{key} {state}, but must be {allowed}",
            where=self.where,
            fix="download the model's config.json again, or correct this key",
            rule="CFG-06",
        )


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of config.json that only has the values of our layers, such as hidden_act."""

    key: str
    default: Any
    """What transformers takes where the key is missing."""
    allowed: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One of megatron-core's tensors (of one layer) and the tensors of transformers that it is fused from."""

    key: str
    layer: int | None
    sources: Mapping[str, tuple[int, ...]]
    """Shapes by name."""
    axis: int | None = None
    """The axis along which TP splits it."""
    num_pieces: int = 1
    is_transposed: bool = False
    """Whether transformers stores the matrix as [I, O]: GPT-2's Conv1D."""
    expert: int | None = None
    """megatron-core stores a tensor of all experts of all layers, [layers, experts, …]."""

    @property
    def index(self) -> tuple[int, ...]:
        """Return the place of the tensor in the checkpoint's tensor of all layers: its layer, and its expert."""
        return tuple(i for i in (self.layer, self.expert) if i is not None)

    @property
    def is_linear(self) -> bool:
        """Whether it is stored in FP8 with precision=fp8: the matrix of a layer that TP splits, not its bias."""
        return self.layer is not None and self.axis is not None and self.key.endswith(".weight")


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are converted together into one file."""

    name: str
    weights: list[Weight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one family's config.json means for sizes, layers, conversion and engines."""

    name: str
    """The name of its file, and the value of model.family."""
    model_types: tuple[str, ...]
    """Values of model_type in config.json; export writes the first."""
    fixed: tuple[Fixed, ...]
    """Settings of which our layers have one value only."""
    refused: Callable[[ConfigJson], list[str]] = lambda config: []
    """Returns other settings that our layers do not have, each as a clause such as "rope_type is yarn"."""
    has_layers_of: Callable[[Model], bool]
    """Whether a model has the layers of this family."""
    model_of: Callable[..., Model]
    """model_of(config, name=, source=) returns the model of a config.json without the settings above."""
    config_of: Callable[[Model], dict[str, Any]]
    """Returns the config.json of a model, without its dtype; engine=huggingface builds the model from it.

    It has a key for everything that changes a result: for a missing key, transformers takes its own default, such as a
    dropout of 0.1, or a padding token whose embedding has no gradient.
    """
    units: Callable[..., list[Unit]]
    """units(model, fused=) returns all tensors of a model; fused: q, k and v are one tensor in the source."""
    has_peft_linears: bool = True
    """Whether its linears have Llama's names in transformers (q_proj, …), which adapters need."""
    engines: tuple[EngineName, ...] = (EngineName.megatron, EngineName.huggingface)
    why_not_others: str | None = None
    """What the layers have that other engines do not."""
    dequantised: tuple[str, ...] = ()
    """Values of quant_method of which transformers dequantises the weights on load."""

    def weights(self, model: Model) -> list[Weight]:
        """Return all tensors of a model."""
        return [weight for unit in self.units(model, fused=False) for weight in unit.weights]

    def tensors(self, model: Model) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a model's tensors by transformers' names."""
        return {name: tuple(shape) for weight in self.weights(model) for name, shape in weight.sources.items()}

    def unsupported(self, config: ConfigJson) -> list[str]:
        """Return the settings of a config.json that our layers do not have."""
        values = ((key, config.values.get(key.key, key.default)) for key in self.fixed)
        wrong = [
            f"{key.key} is {json.dumps(value)[:80]} (supported: {' or '.join(map(json.dumps, key.allowed))})"
            for key, value in values
            if value not in key.allowed
        ]
        return wrong + self.refused(config)
