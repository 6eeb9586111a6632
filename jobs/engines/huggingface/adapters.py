"""PEFT's adapters on the projections that megatron-core's linear_qkv and linear_proj are: q, k, v and o.

An adapter of linear_qkv has one A, and so q, k and v share theirs. Then both engines train the same numbers from the
same seed, and adapters of one load in the other; PEFT alone would train three times as many A.
"""

import re
from collections.abc import Iterator
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from bench.contract.plan import Plan
from bench.contract.training import Lora
from bench.errors import ConfigError
from jobs.weights.adapters import MODULES
from jobs.weights.drawn import drawn

_PLACE = re.compile(r"layers\.(\d+)\.self_attn\.(\w+)\.lora_([AB])")
IN_PEFT = "base_model.model."


def attach(model: PreTrainedModel, plan: Plan) -> None:
    """Put adapters without memory into the model, and freeze everything else.

    Raises:
        ConfigError: the model is no Llama.
    """
    lora = _lora(plan)
    if model.config.model_type != "llama":
        raise ConfigError(
            f"adapters are for Llamas, and {plan.config.model.name} is a {model.config.model_type}",
            where="task.training.trains",
            fix="train all weights (task.training.trains=all task.training.lora=null), or choose a Llama",
        )
    targets = [name for module in lora.target_modules for name in MODULES[module]]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets)
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    tie(model)


def tie(model: Module) -> None:
    """Let q, k and v of each layer share one A."""
    for module in model.modules():
        q = getattr(module, "q_proj", None)
        if q is None or not hasattr(q, "lora_A"):
            continue
        others: tuple[Any, Any] = (module.k_proj, module.v_proj)
        for other in others:
            other.lora_A.default.weight = q.lora_A.default.weight


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return ".lora_" in name


def first(name: str, shape: tuple[int, ...], plan: Plan, seed: int) -> Tensor:
    """Return an adapter's first weights, the same as this seed's in the other engine."""
    place = _PLACE.search(name)
    assert place is not None, name
    layer, module, letter = place.groups()
    linear = next(linear for linear, modules in MODULES.items() if module in modules)
    return drawn(shape, letter, seed=seed, name=f"layer {int(layer) + 1} self_attention.{linear}")


def in_peft(name: str) -> str:
    """Return a parameter's name as PEFT writes it into a folder."""
    return IN_PEFT + name.replace(".default.", ".")


def written(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters by their names in a PEFT folder, q's A for k and v too."""
    for name, tensor in tensors.items():
        yield in_peft(name), tensor
        if ".q_proj.lora_A" in name:
            for other in (".k_proj.lora_A", ".v_proj.lora_A"):
                yield in_peft(name.replace(".q_proj.lora_A", other)), tensor.clone()


def _lora(plan: Plan) -> Lora:
    lora = plan.config.training.lora
    assert lora is not None, "the plan trains adapters"
    return lora


def trained(model: Module) -> dict[str, Parameter]:
    """Return the parameters that are trained, by name; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
