"""The frozen 4-bit base of QLoRA, as bitsandbytes has it: NF4 with double quantisation, products in BF16."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import BitsAndBytesConfig, PreTrainedModel


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


def quantize(module: Module, weight: Tensor, device: torch.device) -> None:
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
