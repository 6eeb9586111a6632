"""Read and write folders of transformers, tensor by tensor, with transformers' own mapping between files and modules.

A file may have one tensor for each expert where the module has one for all: transformers knows how to join them when it
loads and to split them when it saves. `from_pretrained` would hold the whole model in the memory of every rank.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from bench.contract import described_model
from bench.contract.described_model import Described
from bench.errors import ConfigError
from jobs.engines.huggingface.described import transformers_model
from jobs.weights import source
from jobs.weights.source import INDEX, SHARD_BYTES, SINGLE

DERIVED = r"rotary_emb\.inv_freq$"
"""A table in older folders that every model computes itself."""
_LAYER = re.compile(r"\.\d+\.")


def meta_model(described: Described) -> PreTrainedModel:
    """Return the model with parameters on the meta device."""
    config = transformers_model.parsed(described.config_json, where="model.described.config_json")
    return transformers_model.build(config, attention="eager")


@dataclass(slots=True)
class _Group:
    """Tensors of the files that are converted together, and how."""

    prototype: Any
    first: str
    """The parameter, or the first of those, that it is converted to."""
    tensors: list[tuple[str, str]] = field(default_factory=list)
    """Name in the files, and the pattern that it matched."""


class Folder:
    """The weights of a folder, read one parameter at a time.

    Raises:
        ConfigError: config.json is not that of the plan; a tensor is missing, unknown or has another shape.
    """

    def __init__(self, folder: Path, described: Described) -> None:
        self._source = source.open_source(folder)
        described_model.require_same(self._source.config, described, where=str(folder / "config.json"))
        self._model = meta_model(described)
        self._shapes = {name: tuple(p.shape) for name, p in self._model.state_dict().items()}
        self._quantizer = _mxfp4(described) if described.is_mxfp4 else None
        self._groups = self._grouped()
        self._names = _aliases(self._model)
        self._last: tuple[str, Mapping[str, Any]] = ("", {})
        self._require_complete(folder)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter as `from_pretrained` loads it, in the data type of the files."""
        group = self._group_of(name)
        assert group is not None, f"{name} is missing"  # `_require_complete` has refused such a folder
        if self._last[0] != group.first:
            self._last = (group.first, self._converted(group))
        read = next(self._last[1][other] for other in self._names[name] if other in self._last[1])
        tensor: Tensor = read[0] if isinstance(read, list) else read
        if tuple(tensor.shape) != shape:
            raise _refused(
                self._source.folder, f"{name} has the shape {tuple(tensor.shape)}, but config.json requires {shape}"
            )
        return tensor

    def _group_of(self, name: str) -> _Group | None:
        """Return the group that is converted to a parameter, or to one that is tied to it."""
        return next((self._groups[other] for other in self._names[name] if other in self._groups), None)

    def _converted(self, group: _Group) -> Mapping[str, Any]:
        transform = deepcopy(group.prototype)
        for stored, pattern in group.tensors:
            transform.add_tensor(group.first, stored, pattern, _reader(self._source, stored))
        converted: Mapping[str, Any] = transform.convert(
            group.first, model=self._model, config=self._model.config, hf_quantizer=self._quantizer
        )
        return converted

    def _grouped(self) -> dict[str, _Group]:
        """Return the groups by each parameter that they are converted to.

        Source: transformers 5.23, core_model_loading.convert_and_load_state_dict_in_model.
        """
        mapping = get_model_conversion_mapping(self._model, None, self._quantizer)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        shapes, prefix = dict(self._shapes), self._model.base_model_prefix
        groups: dict[str, _Group] = {}
        for stored in sorted(self._source.tensors, key=_natural):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, shapes)
            if name not in shapes and stored in shapes:
                name, pattern = rename_source_key(stored, [], [], prefix, shapes)
            if name not in shapes:
                self._require_ignored(name)
                continue
            prototype = WeightRenaming(stored, name) if pattern is None else of_pattern[pattern]
            group = groups.setdefault(name, _Group(prototype, name))
            group.tensors.append((stored, pattern or stored))
        for group in list(groups.values()):
            for target in group.prototype.target_patterns[1:]:
                groups[group.first.replace(group.prototype.target_patterns[0], target)] = group
        return groups

    def _require_ignored(self, name: str) -> None:
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ()), DERIVED]
        if not any(re.search(pattern, name) for pattern in ignored):
            raise _refused(self._source.folder, f"the model class {type(self._model).__name__} has no tensor {name}")

    def _require_complete(self, folder: Path) -> None:
        missing = [name for name in self._shapes if self._group_of(name) is None]
        if missing:
            raise _refused(folder, f"{len(missing)} of {len(self._shapes)} tensors are missing, such as {missing[0]}")


def _natural(name: str) -> list[Any]:
    """Return a key that sorts numbers by value: experts are joined in this order."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _reader(opened: source.Source, name: str) -> Callable[[], Tensor]:
    return lambda: opened.read([name])[0]


def _aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the names of each parameter: tied ones have several."""
    names: dict[int, list[str]] = {}
    every = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in every:
        names.setdefault(id(parameter), []).append(name)
    return {name: [name, *names[id(parameter)]] for name, parameter in every}


def _mxfp4(described: Described) -> Any:
    """Return the quantizer that converts MXFP4 to numbers when a tensor is loaded."""
    from transformers import Mxfp4Config
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    stored = json.loads(described.config_json)["quantization_config"]
    config = Mxfp4Config(modules_to_not_convert=stored.get("modules_to_not_convert"), dequantize=True)
    return Mxfp4HfQuantizer(config, pre_quantized=True)


def _refused(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=str(folder),
        fix="download the model again, or set MODEL to the folder of another model",
        rule="CFG-06",
    )


def write(
    folder: Path,
    described: Described,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: str,
    max_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder as `save_pretrained` does: the names of the files of this model type, safetensors and config.json.

    tensors: all parameters by name in the order of the model; those of one layer follow each other.
    dtype: that of config.json, by torch's name.
    """
    model = meta_model(described)
    files: dict[str, list[str]] = {}
    for number, shard in enumerate(_shards(model, tensors, max_bytes), 1):
        files[f"part-{number}"] = list(shard)
        save_file(shard, folder / f"part-{number}", metadata={"format": "pt"})
    rename_shards(folder, files)
    values = json.loads(described.config_json)
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(values | {"dtype": dtype}, indent=2) + "\n")


def _shards(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file. Those of a layer are converted together."""
    shard: dict[str, Tensor] = {}
    for layer in _by_layer(tensors):
        converted = {name: x.contiguous() for name, x in revert_weight_conversion(model, layer).items()}
        if shard and _num_bytes(shard) + _num_bytes(converted) > max_bytes:
            yield shard
            shard = {}
        shard |= converted
    yield shard


def _by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    of_layer: dict[str, Tensor] = {}
    last: str | None = None
    for name, tensor in tensors:
        match = _LAYER.search(name)
        layer = name[: match.end()] if match else name
        if of_layer and layer != last:
            yield of_layer
            of_layer = {}
        of_layer[name], last = tensor, layer
    yield of_layer


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def rename_shards(folder: Path, files: Mapping[str, list[str]]) -> None:
    """Rename the files to the names that transformers expects; if there are several, write their index."""
    if len(files) == 1:
        (folder / "part-1").rename(folder / SINGLE)
        return
    named = {part: f"model-{n:05}-of-{len(files):05}.safetensors" for n, part in enumerate(files, 1)}
    for part, name in named.items():
        (folder / part).rename(folder / name)
    index = {name: named[part] for part, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n")


class InitialWeights:
    """Random weights by transformers' own initialisation of each module; they depend on the seed only.

    An initialisation that a model applies to modules of its children (GPT-2's scaled projections) is left out.
    """

    def __init__(self, described: Described, seed_of: Callable[[str], int], device: torch.device) -> None:
        self._model = meta_model(described)
        self._seed_of, self._device = seed_of, device
        self._last: tuple[str, Any] = ("", None)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the initial value of a parameter."""
        owner, _, key = name.rpartition(".")
        if self._last[0] != owner:
            self._last = (owner, self._initialised(owner))
        tensor: Tensor = self._last[1]._parameters[key]
        return tensor.detach()

    @torch.no_grad()
    def _initialised(self, owner: str) -> Any:
        module = deepcopy(self._model.get_submodule(owner)).to_empty(device=self._device)
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._seed_of(owner))
            self._model._init_weights(module)
            for name, parameter in module.named_parameters():
                if parameter.isnan().any():
                    _fill(name, parameter, self._model.config)
        return module


def _fill(name: str, parameter: Tensor, config: Any) -> None:
    """Fill a parameter that the model leaves as its constructor makes it."""
    if parameter.dim() > 1:
        parameter.normal_(std=getattr(config, "initializer_range", None) or 0.02)
    else:
        parameter.fill_(float(name.endswith("weight")))
