"""Where weights come from, one whole tensor after the other, by the names of transformers' model."""

import hashlib
import math
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.contract import checkpoint, llama_config
from bench.contract.checkpoint import Stored
from bench.contract.model import Model
from bench.contract.plan import Plan
from bench.errors import ConfigError
from jobs.engines.huggingface import adapters
from jobs.weights import adapters as peft
from jobs.weights import families, source, tensor_map
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.tensor_map import Weight

INTO_RESIDUALS = ("o_proj.weight", "down_proj.weight", "c_proj.weight")
Shape = tuple[int, ...]


class Source(Protocol):
    """Weights, read one at a time."""

    def read(self, name: str, shape: Shape) -> Tensor:
        """Return a whole tensor, in any float type."""


def canonical(name: str) -> str:
    """Return the name of a parameter in the model without adapters, and of an adapter without PEFT's own part."""
    return name.replace(".base_layer.", ".").replace("lora_A.default", "lora_A").replace("lora_B.default", "lora_B")


class Drawn:
    """Random weights of a seed: the same on every rank, drawn on its device."""

    def __init__(self, plan: Plan, seed: int, device: torch.device) -> None:
        self._plan, self._seed, self._device = plan, seed, device
        self._std = math.sqrt(2 / (5 * plan.config.model.hidden_size))  # SmallInit (Nguyen and Salazar, 2019)

    def read(self, name: str, shape: Shape) -> Tensor:
        if adapters.is_adapter(name):
            return adapters.first(name, shape, self._plan, self._seed)
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("weight")))
        std = self._std
        if name.endswith(INTO_RESIDUALS):
            std /= math.sqrt(2 * self._plan.config.model.num_layers)
        digest = hashlib.sha256(f"{self._seed} {canonical(name)}".encode()).hexdigest()
        generator = torch.Generator(self._device).manual_seed(int(digest[:12], 16))
        return torch.empty(shape, device=self._device).normal_(std=std, generator=generator)


class HuggingFaceFolder:
    """A folder with config.json and *.safetensors.

    Raises:
        ConfigError: it holds another model, or one of a type that is not read.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self._source, self._model = source.open_source(folder), model
        if self._source.config.get("model_type") == "gpt2":
            _check_gpt2(self._source.config, model, where=str(folder / "config.json"))
        else:
            llama_config.check(self._source.config, model, where=str(folder / "config.json"))
            if tensor_map.is_fused(self._source):
                raise ConfigError(
                    "q, k and v are one tensor here, and transformers' Llama has three",
                    where=str(folder),
                    fix="use the weights that Meta publishes, or train with engine=megatron",
                )

    def read(self, name: str, shape: Shape) -> Tensor:
        stored = self._source.tensors.get(canonical(name))
        if stored is None or stored.shape != shape:
            raise _not_of(self._model, self._source.folder, f"{canonical(name)} is {stored and stored.shape}")
        return self._source.read([canonical(name)])[0]


class MegatronFolder:
    """A checkpoint of megatron-core, as the other engine saves it and as conversion writes it.

    Raises:
        ConfigError: it is none, or its linears are quantised.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        if checkpoint.stored(folder) is not Stored.plain:
            raise ConfigError(
                f"this checkpoint holds its linears in {checkpoint.stored(folder).name}",
                where=str(folder),
                fix="point MODEL at the Hugging Face folder, or convert it without --fp8 and --nf4",
            )
        self._reader, self._model, self._family = Reader(folder), model, families.of(model)
        weights = self._family.weights(model)
        self._places = {name: (weight, i) for weight in weights for i, name in enumerate(weight.sources)}
        self._last: tuple[str, list[Tensor]] = ("", [])

    def read(self, name: str, shape: Shape) -> Tensor:
        weight, index = self._places[canonical(name)]
        if self._last[0] != f"{weight.layer} {weight.key}":  # q, k and v are asked for one after the other
            parts = self._family.parts(weight, self._whole(weight), self._model)
            self._last = (f"{weight.layer} {weight.key}", parts)
        part = self._last[1][index]
        if tuple(part.shape) != shape:
            raise _not_of(self._model, self._reader.folder, f"{canonical(name)} is {tuple(part.shape)}")
        return part

    def _whole(self, weight: Weight) -> Tensor:
        whole, is_layer = self._reader.stored(weight.key).whole, weight.layer is not None
        data = torch.empty((1, *whole[1:]) if is_layer else whole)
        offset = (weight.layer or 0, *(0 for _ in whole[1:]))
        self._reader.read([Wanted(weight.key, whole, offset, data)])
        return data[0] if is_layer else data


class Adapters:
    """The adapters of a PEFT folder, or of a checkpoint of megatron-core.

    Raises:
        ConfigError: they are not those of the plan, or q, k and v have different A.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        model, lora = plan.config.model, plan.config.training.lora
        assert lora is not None, "the plan trains adapters"
        self._tensors = peft.load(folder, model, lora)
        peft.fused(self._tensors, model, lora, folder)  # says what is missing or different

    def read(self, name: str, shape: Shape) -> Tensor:
        return self._tensors[adapters.in_peft(name)]


class Trained:
    """The master weights of a checkpoint that this engine has saved."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, name: str, shape: Shape) -> Tensor:
        data = torch.empty(shape)
        self._reader.read([Wanted(canonical(name), shape, (0,) * len(shape), data)])
        return data


def of_folder(folder: Path, plan: Plan) -> Source:
    """Return the weights of a Hugging Face folder, or of a checkpoint of megatron-core.

    Raises:
        ConfigError: it is neither, or holds another model.
    """
    model = plan.config.model
    if checkpoint.is_source(folder):
        return HuggingFaceFolder(folder, model)
    checkpoint.require(folder, plan.config)
    return MegatronFolder(folder, model)


GPT2_DEFAULTS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
"""What a config.json leaves out. Source: transformers 5.23, GPT2Config."""


def _check_gpt2(config: dict[str, Any], model: Model, *, where: str) -> None:
    """Do nothing if config.json describes the plan's model, as far as the shapes of weights do not tell.

    Raises:
        ConfigError: it describes another one.
    """
    wanted = families.of(model).config(model)
    names = ("model_type", "n_head", *GPT2_DEFAULTS)
    found = {name: config.get(name, GPT2_DEFAULTS.get(name)) for name in names}
    wrong = [f"{name} is {got} instead of {wanted.get(name)}" for name, got in found.items() if got != wanted.get(name)]
    if wrong:
        raise ConfigError(
            f"this is not {model.name}: {'; '.join(wrong)}",
            where=where,
            fix="name a folder of this model; GPT-3 here has the exact GELU, and not GPT-2's approximation",
            rule="CFG-06",
        )


def _not_of(model: Model, folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"not a checkpoint of {model.name}: {what}",
        where=str(folder),
        fix="run jobs.tasks.prepare, or point MODEL at the weights of this model",
        rule="CFG-06",
    )
