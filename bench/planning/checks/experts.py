"""Checks of a mixture of experts, which engine=megatron trains with megatron-core's own MoE layer."""

from collections.abc import Iterator
from dataclasses import replace

from bench.contract.families import FAMILIES
from bench.contract.model import Activation, Model
from bench.contract.schema import Config, EngineName, Precision
from bench.contract.task import Kind
from bench.contract.training import Trains
from bench.errors import ConfigError

Refusal = tuple[bool, str, str, str]
"""Whether it is refused, the problem, the config keys, the fix."""


def check(config: Config) -> None:
    """Raise ConfigError for the first setting of experts that is invalid, or that their layer does not support."""
    for is_refused, what, where, fix in (*_split(config), *_sizes(config), *_training(config)):
        if is_refused:
            raise ConfigError(what, where=where, fix=fix)


def _split(config: Config) -> Iterator[Refusal]:
    """Yield the settings with which experts cannot be split over ranks."""
    ep, experts, where, one = config.parallel.ep, config.model.experts, "parallel.ep", "set parallel.ep=1"
    if ep == 1:
        return
    yield experts is None, f"ep is {ep}, but {config.model.name} has no experts", where, one
    name, kind = config.engine.name, config.task.kind
    what = f"ep is {ep}, but only training with engine=megatron splits experts over ranks"
    yield name is not EngineName.megatron or kind is not Kind.train, what, where, one
    num_experts = experts.num_experts if experts else ep
    what = f"ep {ep} does not divide the {num_experts} experts of {config.model.name}"
    yield num_experts % ep != 0, what, where, "set parallel.ep to a divisor of the number of experts"
    what = f"ep is {ep}, but ranks that hold different experts need the distributed optimizer"
    where = "parallel.ep, parallel.distributed_optimizer"
    yield not config.parallel.distributed_optimizer, what, where, "set parallel.distributed_optimizer=true"
    what = "local SGD averages whole models, but with ep above 1, a rank has only a part of the experts"
    is_averaged = config.recipe is not None and config.recipe.averaging is not None
    yield is_averaged, what, "parallel.ep, parallel.groups", one


def _sizes(config: Config) -> Iterator[Refusal]:
    experts = config.model.experts
    if experts is None:
        return
    used, total, where = experts.experts_per_token, experts.num_experts, "model.experts.experts_per_token"
    what = f"experts_per_token is {used}, but the model has only {total} experts"
    yield used > total, what, where, f"set {where} to at most {total}"


def _training(config: Config) -> Iterator[Refusal]:
    """Yield what megatron-core's MoE layer without Transformer Engine does not support."""
    m, experts, where = config.model, config.model.experts, "model"
    if experts is None or config.task.kind is not Kind.train or config.engine.name is not EngineName.megatron:
        return
    what = f"engine=megatron trains experts in FP32 and BF16, but precision is {config.precision.name}"
    yield config.precision is Precision.fp8, what, "precision", "set precision=bf16"
    is_4_bit = config.training.trains is Trains.qlora
    what = "4-bit weights (qlora) need a model without experts"
    yield is_4_bit, what, "task.training.trains", "set task.training.trains=lora: adapters on attention, experts frozen"
    what = f"engine=megatron needs experts with swiglu and no bias, but {m.name} has {m.activation.name}, bias {m.bias}"
    is_other = m.activation is not Activation.swiglu or m.bias
    yield is_other, what, where, "choose a model such as mixtral_8x7b, or set engine=huggingface"
    what = "with experts_per_token=1 and normalize_top_k=true the router has no gradient: each weight is 1"
    where = "model.experts.experts_per_token, model.experts.normalize_top_k"
    is_constant = experts.experts_per_token == 1 and experts.normalize_top_k
    fix = "set model.experts.experts_per_token to 2 or more"
    fix += ", or model.experts.normalize_top_k=false" if _may_skip_normalising(m) else ""
    yield is_constant, what, where, fix


def _may_skip_normalising(m: Model) -> bool:
    """Return whether a family has the layers of a model with normalize_top_k=false."""
    families = [family for name, family in FAMILIES.items() if m.family in (None, name)]
    changed = replace(m, experts=replace(m.experts, normalize_top_k=False)) if m.experts else m
    return any(family.has_layers_of(changed) for family in families)
