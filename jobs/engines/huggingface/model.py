"""Build transformers' model of a plan, without memory for its weights: what places it on devices gives it some."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from bench.contract.engine import Bf16
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Precision
from bench.contract.training import Trains
from jobs.engines.huggingface import adapters
from jobs.engines.huggingface.packages import settings
from jobs.weights import families


def replace_linears(model: PreTrainedModel) -> None:
    """Put bitsandbytes' linears in the place of all but the head; they have no weights yet.

    Source: QLoRA (Dettmers et al., 2023), and transformers' documentation of bitsandbytes.
    """
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=config)
    model.is_loaded_in_4bit = True  # PEFT then takes its adapters for such linears


def is_quantized(parameter: Any) -> bool:
    """Return whether a parameter is one of bitsandbytes' 4-bit weights, without importing it."""
    return type(parameter).__name__ == "Params4bit"


def quantize(module: Any, weight: Tensor, device: torch.device) -> None:
    """Give one of bitsandbytes' linears its weight, rounded to BF16 first, in 4 bits on the device."""
    old = module.weight
    rounded = weight.to(torch.bfloat16).contiguous()
    module.weight = type(old)(
        rounded,
        requires_grad=False,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=old.quant_storage,
        module=module,
    ).to(device)


BF16, FP32 = torch.bfloat16, torch.float32


def build(plan: TrainingPlan, *, around: AbstractContextManager[Any] | None = None) -> PreTrainedModel:
    """Return the model with its adapters, if it has any; the parameters lie on the meta device, the buffers do not.

    around: a context in which the model is made, and which gives its parameters memory instead (ZeRO stage 3).
    """
    model = bare(plan, around=around)
    trains = plan.config.training.trains
    cast(model, trained_dtype(plan) if trains is Trains.all else frozen_dtype(plan))
    if trains is Trains.qlora:
        replace_linears(model)
    if trains is not Trains.all:
        adapters.attach(model, plan)
        cast(model, trained_dtype(plan), only_trained=True)
    if is_checkpointed(plan):
        _checkpoint_activations(model, plan)
    return model


def bare(plan: Plan, *, around: AbstractContextManager[Any] | None = None) -> PreTrainedModel:
    """Return the model in FP32, whose parameters lie on the meta device, or where `around` puts them."""
    described = families.of(plan.config.model).config(plan.config.model)
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    with ExitStack() as stack:
        stack.enter_context(no_init_weights())
        stack.enter_context(around or init_empty_weights(include_buffers=False))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=settings(plan).attention.name, dtype=FP32)
    model.tie_weights()  # transformers does so with the first weights that it draws, and it draws none
    return model


def cast(model: Module, dtype: torch.dtype, *, only_trained: bool = False) -> None:
    """Cast the parameters; the tables of RoPE stay in FP32."""
    for parameter in model.parameters():
        if parameter.requires_grad or not only_trained:
            parameter.data = parameter.data.to(dtype)


def trained_dtype(plan: Plan) -> torch.dtype:
    """Return the type of the weights that are trained."""
    is_fp32 = plan.config.precision is Precision.fp32 or settings(plan).bf16_mode is Bf16.autocast
    return FP32 if is_fp32 else BF16


def frozen_dtype(plan: Plan) -> torch.dtype:
    """Return the type of the weights below adapters."""
    return FP32 if plan.config.precision is Precision.fp32 else BF16


def is_autocast(plan: Plan) -> bool:
    """Return whether products are computed in BF16 under autocast, from weights in FP32."""
    return plan.config.precision is Precision.bf16 and settings(plan).bf16_mode is Bf16.autocast


def is_checkpointed(plan: TrainingPlan) -> bool:
    """Return whether each layer is computed again in the backward pass."""
    asked = settings(plan).activation_checkpointing
    return plan.recompute.full if asked is None else asked


def give_memory(model: Module, device: torch.device | dict[str, torch.device]) -> None:
    """Give parameters on the meta device memory on this device, or each module's its own; tied ones stay tied."""
    given: dict[int, Parameter] = {}
    for name, module in model.named_modules():
        to = device if isinstance(device, torch.device) else _device_of(name, device)
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or is_quantized(parameter):
                continue
            if id(parameter) not in given:
                memory = torch.empty_like(parameter, device=to)
                given[id(parameter)] = Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[key] = given[id(parameter)]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(to)


def tie(model: PreTrainedModel) -> None:
    """Let parameters be shared again that have been given memory one by one: q, k and v's A, embeddings and head."""
    model.tie_weights()
    adapters.tie(model)


def layers(model: PreTrainedModel) -> list[Module]:
    """Return the decoder layers of a Llama or a GPT-2."""
    stack = model.get_decoder()
    return list(stack.layers if hasattr(stack, "layers") else stack.h)


def _device_of(name: str, devices: dict[str, torch.device]) -> torch.device:
    """Return the device of the longest name that a module's name begins with."""
    fitting = [known for known in devices if known == "" or name == known or name.startswith(f"{known}.")]
    inside = [device for known, device in devices.items() if known.startswith(name)]
    return devices[max(fitting, key=len)] if fitting else inside[0]


def _checkpoint_activations(model: PreTrainedModel, plan: TrainingPlan) -> None:
    """Recompute layers as transformers does.

    ZeRO stage 3 releases weights between the passes, which only reentrant checkpoints take; they in turn pass
    gradients on only if their input requires some, which a frozen embedding's output does not.
    """
    is_zero_3 = plan.deepspeed is not None and settings(plan).is_sharded
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_zero_3})
    if is_zero_3:
        model.enable_input_require_grads()
