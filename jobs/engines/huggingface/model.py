"""Build a plan's model with transformers on the meta device; its strategy allocates the weights."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.nn import Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from bench.contract import families
from bench.contract.engine import Bf16
from bench.contract.modules import Part
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Precision
from bench.contract.training import Trains
from jobs.engines.huggingface import adapters, quantized
from jobs.engines.huggingface.described import transformers_model
from jobs.engines.huggingface.packages import settings
from jobs.profiles.ranges import forward_range

BF16, FP32 = torch.bfloat16, torch.float32
Around = transformers_model.Around


def build(plan: TrainingPlan, *, around: Around | None = None) -> PreTrainedModel:
    """Return the model with its adapters, if it has any. Buffers are allocated.

    Parameters are on the meta device, or, except adapters, where `around` puts them.
    """
    model = build_base(plan, around=around)
    trains = plan.config.training.trains
    cast(model, trained_dtype(plan) if trains is Trains.all else frozen_dtype(plan))
    if trains is Trains.qlora:
        quantized.replace_linears(model)
    if trains is not Trains.all:
        adapters.attach(model, plan)
        cast(model, trained_dtype(plan), only_trained=True)
    if trains is Trains.qlora:
        with (around or partial(torch.device, "meta"))():
            quantized.make_trainable(model)
    if is_checkpointed(plan):
        _checkpoint_activations(model, plan)
    return model


def build_base(plan: Plan, *, around: Around | None = None) -> PreTrainedModel:
    """Return the model in FP32 without adapters; parameters are on the meta device, or where `around` puts them."""
    if (model_of := plan.config.model.described) is not None:
        own = transformers_model.parsed(model_of.config_json, where="model.described.config_json")
        return transformers_model.build(own, attention=settings(plan).attention.name, around=around)
    described = families.of_model(plan.config.model).config_of(plan.config.model)
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    with ExitStack() as stack:
        stack.enter_context(no_init_weights())
        stack.enter_context(around() if around else init_empty_weights(include_buffers=False))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=settings(plan).attention.name, dtype=FP32)
    model.tie_weights()  # transformers ties weights when it initialises them, which is switched off here
    return model


def cast(model: Module, dtype: torch.dtype, *, only_trained: bool = False) -> None:
    """Cast the parameters; buffers such as RoPE's tables stay in FP32."""
    for parameter in model.parameters():
        if parameter.requires_grad or not only_trained:
            parameter.data = parameter.data.to(dtype)


def trained_dtype(plan: Plan) -> torch.dtype:
    """Return the data type of trained weights."""
    is_fp32 = plan.config.precision is Precision.fp32 or settings(plan).bf16_mode is Bf16.autocast
    return FP32 if is_fp32 else BF16


def frozen_dtype(plan: Plan) -> torch.dtype:
    """Return the data type of the frozen base weights."""
    return FP32 if plan.config.precision is Precision.fp32 else BF16


def is_autocast(plan: Plan) -> bool:
    """Return whether weights are in FP32 and GEMMs in BF16 under autocast."""
    return plan.config.precision is Precision.bf16 and settings(plan).bf16_mode is Bf16.autocast


def is_checkpointed(plan: TrainingPlan) -> bool:
    """Return whether each layer is recomputed in the backward pass."""
    requested = settings(plan).activation_checkpointing
    return plan.recompute.full if requested is None else requested


def allocate(model: Module, device: torch.device | dict[str, torch.device]) -> None:
    """Allocate meta parameters on a device, or on the device of their module; tied parameters stay tied."""
    allocated: dict[int, Parameter] = {}
    for name, module in model.named_modules():
        to = device if isinstance(device, torch.device) else _device_of(name, device)
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or quantized.is_quantized(parameter):
                continue
            if id(parameter) not in allocated:
                memory = torch.empty_like(parameter, device=to)
                allocated[id(parameter)] = Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[key] = allocated[id(parameter)]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(to)


def tie(model: PreTrainedModel, plan: TrainingPlan) -> None:
    """Tie parameters again after each was allocated: the shared A of q, k and v; embeddings and head."""
    model.tie_weights()
    adapters.tie_qkv(model, plan)


def layers(model: PreTrainedModel) -> list[Module]:
    """Return the decoder layers."""
    return list(transformers_model.layer_list(model)[1])


def _device_of(name: str, devices: dict[str, torch.device]) -> torch.device:
    """Return the device of the longest key that is a prefix of a module's name."""
    fitting = [known for known in devices if known == "" or name == known or name.startswith(f"{known}.")]
    inside = [device for known, device in devices.items() if known.startswith(name)]
    return devices[max(fitting, key=len)] if fitting else inside[0]


def _checkpoint_activations(model: PreTrainedModel, plan: TrainingPlan) -> None:
    """Recompute layers as transformers does.

    ZeRO stage 3 releases weights between the forward and the backward pass, which only reentrant checkpointing
    supports. Reentrant checkpointing needs an input that requires gradients; a frozen embedding's output does not.
    """
    is_zero_3 = plan.deepspeed is not None and settings(plan).is_sharded
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_zero_3})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _in_ranges(module._gradient_checkpointing_func)
    if is_zero_3:
        model.enable_input_require_grads()


def _in_ranges(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function whose layers run in a profiler range.

    transformers checkpoints a layer's `forward`, so that hooks of the layer do not run when it is recomputed.
    """

    def run(forward: Callable[..., Any], *args: Any) -> Any:
        def in_range(*args: Any) -> Any:
            with forward_range(Part.residual):
                return forward(*args)

        return checkpoint(in_range, *args)

    return run
