"""Measure what autograd stores for the backward pass of one decoder layer: a forward pass of a short row on the CPU."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from bench.contract.described_model import Probe, ProbeSettings
from bench.errors import ConfigError
from jobs.engines.huggingface.described import transformers_model as models

TOKENS, VOCABULARY = 37, 251
"""Length of the probed row and size of its vocabulary: primes, so that a dimension of a stored tensor tells which it
is."""
TOLERANCE = 1e-4
"""Largest change of an output by later tokens, relative to the largest output: the rounding of a GEMM of experts."""
MOST_EXPERTS = 8
"""At least twice the chosen experts stay; the others add no activations but the router's logits."""
SHARE_OF_MEMORY = 0.5
"""The largest share of the free memory that a probed layer may take. Otherwise shapes alone are computed."""


def measure(config: Any, settings: ProbeSettings, *, where: str) -> Probe:
    """Return the mean over all layers of what one stores, measured on one layer of each kind.

    Raises:
        ConfigError: the layers cannot run on a CPU, or a token's output depends on later tokens.
    """
    kinds = _kinds(models.build(_short_vocabulary(config), attention=settings.attention))
    num_layers = sum(kinds.values())
    linear = quadratic = 0.0
    per_logit = 0.0
    scaled: set[str] = set()
    for index, count in kinds.items():
        stored, notes = _of_layer(config, settings, index, where=where)
        linear += count * stored.linear / num_layers
        quadratic += count * stored.quadratic / num_layers
        per_logit = max(per_logit, stored.logits)
        scaled |= set(notes)
    return Probe(
        bytes_per_token=linear,
        bytes_per_key=quadratic,
        bytes_per_logit=per_logit,
        num_kinds=len(kinds),
        tokens=TOKENS,
        scaled="; ".join(sorted(scaled)) or None,
    )


def _short_vocabulary(config: Any) -> Any:
    short = copy.deepcopy(config)
    short.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(short, name, None) is not None:
            setattr(short, name, 0)
    return short


def _kinds(model: PreTrainedModel) -> dict[int, int]:
    """Return the first layer of each kind and how many there are: by class, kind of attention, and shapes."""
    kinds: dict[Any, int] = {}
    counts: dict[int, int] = {}
    types = getattr(model.config, "layer_types", None)
    for index, layer in enumerate(models.layer_list(model)[1]):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        first = kinds.setdefault((type(layer), types[index] if types else None, shapes), index)
        counts[first] = counts.get(first, 0) + 1
    return counts


class _Stored:
    """Bytes of the tensors that autograd saves inside and outside of the layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.linear = self.quadratic = self.logits = 0.0
        self._weights = {shape for p in model.parameters() for shape in _views(tuple(p.shape))}
        self._given: set[int] = {_storage(p) for p in model.parameters()}
        self._seen: set[int] = set()
        self._kept: list[Tensor] = []  # so that no other tensor gets their memory

    def exclude(self, *tensors: Any) -> None:
        """Do not count tensors that all layers share, such as the mask and RoPE's tables."""
        for one in tensors:
            if isinstance(one, Tensor):
                self._given.add(_storage(one))
                self._kept.append(one)
            elif isinstance(one, tuple | list):
                self.exclude(*one)

    @contextmanager
    def counted(self, *, is_layer: bool) -> Iterator[None]:
        def pack(tensor: Tensor) -> Tensor:
            self._count(tensor, is_layer=is_layer)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def _count(self, tensor: Tensor, *, is_layer: bool) -> None:
        place = _storage(tensor)
        if place in self._seen or place in self._given or tuple(tensor.shape) in self._weights:
            return
        self._seen.add(place)
        self._kept.append(tensor)
        size = tensor.untyped_storage().nbytes() if tensor.device.type == "cpu" else tensor.nbytes
        if not is_layer:
            self.logits += size / (TOKENS * VOCABULARY) if VOCABULARY in tensor.shape else 0.0
        elif sum(size in (TOKENS, TOKENS + 1) for size in tensor.shape) > 1:  # one more key: an attention sink
            self.quadratic += size / TOKENS**2
        else:
            self.linear += size / TOKENS


def _views(shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return a weight's shape, that of its transpose, and for stacked experts those of one expert."""
    if len(shape) < 2:
        return {shape}
    seen = {shape, (*shape[:-2], shape[-1], shape[-2])}
    return seen | (_views(shape[1:]) if len(shape) > 2 else set())


def _storage(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _of_layer(config: Any, settings: ProbeSettings, index: int, *, where: str) -> tuple[_Stored, list[str]]:
    small, notes = _fewer_experts(_short_vocabulary(config))
    model = models.build(small, attention=settings.attention)
    _keep_one_layer(model, index)
    device = "cpu"
    if sum(p.numel() for p in model.parameters()) * 4 > SHARE_OF_MEMORY * _free_bytes():
        device = "meta"
        notes.append("one layer does not fit into this machine's memory: only its shapes were computed")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            _materialise(model, device)
            tokens = torch.randint(1, VOCABULARY, (1, TOKENS), device=device)
            if device == "cpu":
                _require_causal(model, tokens, where=where)
            return _run(model, settings, tokens), notes
    except ConfigError:
        raise
    except Exception as error:  # any operator of any model may refuse
        raise ConfigError(
            f"a test of one layer of {type(model).__name__} failed: {type(error).__name__}: {str(error)[:200]}",
            where=where,
            fix="choose another engine.huggingface.attention or precision, or another model",
        ) from error


def _fewer_experts(config: Any) -> tuple[Any, list[str]]:
    from jobs.engines.huggingface.described.describe import CHOSEN, EXPERTS, _first

    num, chosen = _first(config, EXPERTS), _first(config, CHOSEN)
    kept = max(MOST_EXPERTS, 2 * (chosen or 0))
    if num is None or num <= kept or getattr(config, "n_group", None):
        return config, []
    for name in EXPERTS:
        if getattr(config, name, None) == num:
            setattr(config, name, kept)
    return config, [f"{kept} of {num} experts"]


def _keep_one_layer(model: PreTrainedModel, index: int) -> None:
    """Remove all other layers, also from the lists of config.json that have an entry for each layer."""
    name, layers = models.layer_list(model)
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, ModuleList([layers[index]]))
    config: Any = model.config
    for own, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == len(layers):
            setattr(config, own, [value[index]])
    config.num_hidden_layers = 1


def _materialise(model: PreTrainedModel, device: str) -> None:
    """Allocate random parameters, large enough that every token changes the outputs; tied ones stay tied."""
    allocated: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in allocated:
                    std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
                    memory = torch.empty_like(parameter, device=device).normal_(std=std)
                    allocated[id(parameter)] = torch.nn.Parameter(memory)
                module._parameters[key] = allocated[id(parameter)]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)


@torch.no_grad()
def _require_causal(model: PreTrainedModel, tokens: Tensor, *, where: str) -> None:
    """Refuse a model in which a later token changes an earlier output."""
    other, half = tokens.clone(), TOKENS // 2
    other[:, half:] = (other[:, half:] + 1) % VOCABULARY
    model.eval()
    first, second = (model(input_ids=x, use_cache=False).logits[:, :half] for x in (tokens, other))
    if (first - second).abs().max() > TOLERANCE * first.abs().max():
        raise ConfigError(
            f"{type(model).__name__} is not causal with this config.json: a token's output depends on later tokens",
            where=where,
            fix="choose a decoder-only model (is_decoder=true in config.json)",
        )


def _run(model: PreTrainedModel, settings: ProbeSettings, tokens: Tensor) -> _Stored:
    trained, frozen = getattr(torch, settings.trained), getattr(torch, settings.frozen)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(frozen if settings.lora_rank else trained)
    if settings.lora_rank:
        _adapt(model, settings, trained)
    (layer,) = models.layer_list(model)[1]
    stored = _Stored(model)
    _count_layer(layer, stored)
    autocast = torch.autocast("cpu", torch.bfloat16) if settings.is_autocast else nullcontext()
    # A mask that is complete, because transformers would read the tokens' positions, which have no data on meta.
    mask = torch.zeros(1, 1, TOKENS, TOKENS, device="meta", dtype=frozen) if tokens.is_meta else None
    model.train()
    with stored.counted(is_layer=False), autocast:
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    return stored


def _adapt(model: PreTrainedModel, settings: ProbeSettings, trained: torch.dtype) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_rank,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_modules,
    )
    inject_adapter_in_model(lora, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    model.enable_input_require_grads()  # as adapters of earlier layers do


def _count_layer(layer: Module, stored: _Stored) -> None:
    """Count what is saved while the layer runs; its input counts, because a layer stores it."""
    running: list[Any] = []

    def begin(_: Module, args: Any, kwargs: dict[str, Any]) -> None:
        stored.exclude(*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states"))
        running.append(stored.counted(is_layer=True))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end)


def _free_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
