"""Sources of weights (random, Hugging Face, megatron-core, PEFT): full tensors by transformers' parameter names."""

import hashlib
import math
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bench.contract import checkpoint, families, hugging_face
from bench.contract.checkpoint import Stored
from bench.contract.described_model import Described
from bench.contract.families import Weight
from bench.contract.model import Model
from bench.contract.plan import Plan
from bench.errors import ConfigError
from jobs.engines.huggingface import adapters
from jobs.engines.huggingface.described import transformers_folder
from jobs.weights import adapters as peft
from jobs.weights import source, tensor_map
from jobs.weights.checkpoint_reader import Reader, Wanted

RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "c_proj.weight")
Shape = tuple[int, ...]


class Source(Protocol):
    """Weights, read one at a time."""

    def read(self, name: str, shape: Shape) -> Tensor:
        """Return a full tensor in any float type."""


def canonical(name: str) -> str:
    """Return a parameter's name without the parts that PEFT adds."""
    return name.replace(".base_layer.", ".").replace("lora_A.default", "lora_A").replace("lora_B.default", "lora_B")


class RandomWeights:
    """Random weights of a seed, generated on the device; the same on every rank."""

    def __init__(self, plan: Plan, seed: int, device: torch.device) -> None:
        self._plan, self._seed, self._device = plan, seed, device
        self._own = None
        if (described := plan.config.model.described) is not None:
            self._own = transformers_folder.InitialWeights(described, self._seed_of, device)
        self._std = math.sqrt(2 / (5 * plan.config.model.hidden_size))  # SmallInit (Nguyen and Salazar, 2019)

    def read(self, name: str, shape: Shape) -> Tensor:
        if adapters.is_adapter(name):
            return adapters.initial_weight(name, shape, self._plan, self._seed)
        if self._own is not None:
            return self._own.read(canonical(name), shape)
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("weight")))
        std = self._std
        if name.endswith(RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2 * self._plan.config.model.num_layers)
        generator = torch.Generator(self._device).manual_seed(self._seed_of(canonical(name)))
        return torch.empty(shape, device=self._device).normal_(std=std, generator=generator)

    def _seed_of(self, name: str) -> int:
        return int(hashlib.sha256(f"{self._seed} {name}".encode()).hexdigest()[:12], 16)


class DescribedFolder:
    """The folder of a model that transformers describes."""

    def __init__(self, folder: Path, described: Described) -> None:
        self._folder = transformers_folder.Folder(folder, described)

    def read(self, name: str, shape: Shape) -> Tensor:
        return self._folder.read(canonical(name), shape)


class HuggingFaceFolder:
    """A folder with config.json and *.safetensors.

    Raises:
        ConfigError: it holds another model, or a format that is not supported.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self._source, self._model = source.open_source(folder), model
        families.check(self._source.config, model, where=str(folder / "config.json"))
        if hugging_face.is_fused(self._source.tensors):
            raise ConfigError(
                "the weights have q, k and v in one tensor, but engine=huggingface needs three separate tensors",
                where=str(folder),
                fix="set MODEL to weights with separate q, k and v, such as those from Meta, or set engine=megatron",
            )

    def read(self, name: str, shape: Shape) -> Tensor:
        stored = self._source.tensors.get(canonical(name))
        if stored is None or stored.shape != shape:
            raise _wrong_model(
                self._model,
                self._source.folder,
                name=canonical(name),
                shape=stored.shape if stored else None,
                expected=shape,
            )
        return self._source.read([canonical(name)])[0]


class MegatronFolder:
    """A megatron-core checkpoint, saved by engine=megatron or written by the conversion.

    Raises:
        ConfigError: it is not a checkpoint, or its linears are quantised.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        if (stored := checkpoint.stored(folder)) is not Stored.plain:
            raise ConfigError(
                f"the linear layers of this checkpoint are in {stored.name}, which engine=huggingface cannot load",
                where=str(folder),
                fix="set MODEL to the Hugging Face folder, or convert the weights again without --fp8 and --nf4",
            )
        self._reader, self._model = Reader(folder), model
        weights = families.of_model(model).weights(model)
        self._places = {name: (weight, i) for weight in weights for i, name in enumerate(weight.sources)}
        self._last: tuple[str, list[Tensor]] = ("", [])

    def read(self, name: str, shape: Shape) -> Tensor:
        weight, index = self._places[canonical(name)]
        if self._last[0] != f"{weight.index} {weight.key}":  # q, k and v are read one after another
            parts = tensor_map.parts(weight, self._read_full(weight), self._model)
            self._last = (f"{weight.index} {weight.key}", parts)
        part = self._last[1][index]
        if tuple(part.shape) != shape:
            raise _wrong_model(
                self._model, self._reader.folder, name=canonical(name), shape=tuple(part.shape), expected=shape
            )
        return part

    def _read_full(self, weight: Weight) -> Tensor:
        whole = self._reader.stored(weight.key).whole
        shape = whole[len(weight.index) :]
        data = torch.empty((1,) * len(weight.index) + tuple(shape))
        self._reader.read([Wanted(weight.key, whole, (*weight.index, *(0 for _ in shape)), data)])
        return data.view(shape)


class Adapters:
    """The adapters of a PEFT folder, or of a checkpoint of megatron-core.

    Raises:
        ConfigError: they do not fit the plan, or q, k and v have different A where the plan has a shared one.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        model, lora = plan.config.model, plan.config.training.lora
        assert lora is not None, "the plan trains adapters"
        self._tensors = peft.load(folder, model, lora)
        if model.described is not None:
            adapters.check_complete(self._tensors, plan, folder)
        elif lora.shared_a:
            peft.fused(self._tensors, model, lora, folder)  # raises if an adapter is missing or different
        else:
            peft.check_complete(self._tensors, model, lora, folder)

    def read(self, name: str, shape: Shape) -> Tensor:
        return self._tensors[adapters.peft_name(name)]


class MasterWeights:
    """The master weights of a checkpoint that this engine has saved."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, name: str, shape: Shape) -> Tensor:
        data = torch.empty(shape)
        self._reader.read([Wanted(canonical(name), shape, (0,) * len(shape), data)])
        return data


def open_folder(folder: Path, plan: Plan) -> Source:
    """Return the weights of a Hugging Face folder or of a megatron-core checkpoint.

    Raises:
        ConfigError: the folder is neither, or it holds another model.
    """
    model = plan.config.model
    if model.described is not None:
        return DescribedFolder(folder, model.described)
    if checkpoint.is_source(folder):
        return HuggingFaceFolder(folder, model)
    checkpoint.require(folder, plan.config)
    return MegatronFolder(folder, model)


def _wrong_model(model: Model, folder: Path, *, name: str, shape: Shape | None, expected: Shape) -> ConfigError:
    actual = "is missing" if shape is None else f"has the shape {shape} instead of {expected}"
    return ConfigError(
        f"this is not a checkpoint of {model.name}: {name} {actual}",
        where=str(folder),
        fix="run `python -m jobs.tasks.prepare RUN/plan.json` (RUN: the run folder), or set MODEL to the weights "
        "of this model",
        rule="CFG-06",
    )
