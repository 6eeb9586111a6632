"""PEFT's adapters.

With `shared_a` they are those of megatron-core's linear_qkv and linear_proj: an adapter of linear_qkv has one A, so q,
k and v share one A here too. Thus both engines train the same parameters from the same seed, and each loads the other's
adapters. Without `shared_a`, each linear layer has its own A, as PEFT alone trains them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from bench.contract import families
from bench.contract.plan import Plan
from bench.contract.training import Lora
from bench.errors import ConfigError
from jobs.engines.huggingface.described import transformers_folder, transformers_model
from jobs.weights.adapter_init import init_adapter
from jobs.weights.adapters import MODULES

_PLACE = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])")
PEFT_PREFIX = "base_model.model."


def attach(model: PreTrainedModel, plan: Plan) -> None:
    """Add adapters on the meta device to the model, and freeze all other parameters.

    Raises:
        ConfigError: the linears of this family have other names than Llama's.
    """
    family = None if plan.config.model.described else families.of_model(plan.config.model)
    if family is not None and not family.has_peft_linears:
        raise ConfigError(
            f"engine=huggingface cannot add adapters to {plan.config.model.name}, because the model family "
            f"{family.name} names its linear layers differently",
            where="task.training.trains",
            fix="train all weights (task.training.trains=all task.training.lora=null), or choose a Llama model",
        )
    lora = _lora(plan)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.peft_modules)
    )
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    tie_qkv(model, plan)


def tie_qkv(model: Module, plan: Plan) -> None:
    """Let q, k and v of each layer share one A, if the plan has adapters with a shared A."""
    lora = plan.config.training.lora
    if lora is None or not lora.shared_a:
        return
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


def initial_weight(name: str, shape: tuple[int, ...], plan: Plan, seed: int) -> Tensor:
    """Return an adapter's initial weight; with a shared A, the same as engine=megatron draws from this seed."""
    if plan.config.model.described is not None:
        path, _, letter = peft_name(name).removesuffix(".weight").rpartition(".lora_")
        return init_adapter(shape, letter, seed=seed, name=path)
    place = _PLACE.search(name)
    assert place is not None, name
    layer, module, letter = place.groups()
    if _lora(plan).shared_a:
        module = "self_attention." + next(linear for linear, modules in MODULES.items() if module in modules)
    return init_adapter(shape, letter, seed=seed, name=f"layer {int(layer) + 1} {module}")


def peft_name(name: str) -> str:
    """Return a parameter's name in a PEFT folder."""
    return PEFT_PREFIX + name.replace(".default.", ".")


def peft_tensors(tensors: dict[str, Tensor], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters with their names in a PEFT folder; the A that q, k and v share is written three times."""
    for name, tensor in tensors.items():
        yield peft_name(name), tensor
        if _lora(plan).shared_a and ".q_proj.lora_A" in name:
            for other in (".k_proj.lora_A", ".v_proj.lora_A"):
                yield peft_name(name.replace(".q_proj.lora_A", other)), tensor.clone()


def check_complete(tensors: dict[str, Tensor], plan: Plan, folder: Path) -> None:
    """Check that a PEFT folder has the adapters of a plan whose model transformers describes.

    Raises:
        ConfigError: one is missing, or there are others.
    """
    described = plan.config.model.described
    assert described is not None
    adapted = [name for name, *_ in transformers_model.projections(transformers_folder.meta_model(described))]
    expected = {
        f"{PEFT_PREFIX}{name}.lora_{letter}.weight"
        for name in adapted
        if name.rpartition(".")[2] in _lora(plan).peft_modules
        for letter in "AB"
    }
    if differing := sorted(expected ^ set(tensors)):
        state = "is missing" if differing[0] in expected else "is not in the plan"
        raise ConfigError(
            f"the adapters do not match this plan: the tensor {differing[0]} {state}",
            where=str(folder),
            fix="give the plan.json of the run that trained these adapters, and the index of its trial",
        )


def _lora(plan: Plan) -> Lora:
    lora = plan.config.training.lora
    assert lora is not None, "the plan trains adapters"
    return lora


def trainable(model: Module) -> dict[str, Parameter]:
    """Return the parameters that require gradients, by name; tied parameters once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
