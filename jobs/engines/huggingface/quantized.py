"""A frozen base in 4 bits: bitsandbytes' linears for generation, and linears with its kernels for training.

FSDP2 and ZeRO stage 3 shard floating-point parameters. So the 4-bit weights of a trained model are stored in BF16
elements, as bitsandbytes does with quant_storage. Collectives and copies move these elements without changing a bit.

bitsandbytes' own linear does not train after an evaluation on a CPU with AVX512-BF16: it then changes its weights to a
format for inference, whose kernel has no gradient. Source: bitsandbytes 0.50.2, nn/modules.py, Linear4bit.forward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module, Parameter
from transformers import BitsAndBytesConfig, PreTrainedModel

STORAGE = torch.bfloat16
"""The data type of the GEMMs, so that one group of FSDP2 gathers packed weights together with the other weights."""
PACKED = 4
"""4-bit weights in one element of STORAGE."""
QUANT_TYPE, IS_DOUBLE = "nf4", True


def replace_linears(model: PreTrainedModel) -> None:
    """Replace all linears except the head by bitsandbytes' linears, which have no weights yet.

    Source: QLoRA (Dettmers et al., 2023), and transformers' documentation of bitsandbytes.
    """
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=QUANT_TYPE,
        bnb_4bit_use_double_quant=IS_DOUBLE,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    replace_with_bnb_linear(model, modules_to_not_convert=heads or ["lm_head"], quantization_config=config)
    model.is_loaded_in_4bit = True  # PEFT then uses its adapters for 4-bit linears


def is_quantized(parameter: Any) -> bool:
    """Return whether a parameter is a 4-bit weight of bitsandbytes, without importing that library."""
    return type(parameter).__name__ == "Params4bit"


def quantize(module: Any, weight: Tensor, device: torch.device) -> None:
    """Set the weight of a bitsandbytes linear: rounded to BF16, then quantised to 4 bits on the device."""
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


def make_trainable(model: Module) -> None:
    """Replace the linears of bitsandbytes, also those below adapters, by linears with packed weights."""
    child: Any
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_quantized(child._parameters.get("weight")):
                setattr(module, name, PackedLinear(child.in_features, child.out_features, child.bias))


class PackedLinear(Module):
    """A frozen linear in 4 bits, with the kernels of bitsandbytes' Linear4bit.

    `weight` has one dimension, so that it can be sharded at any element. The scales are not a parameter: each rank has
    all of them.
    """

    def __init__(self, in_features: int, out_features: int, bias: Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        num_elements = in_features * out_features // PACKED
        self.weight = Parameter(torch.empty(num_elements, dtype=STORAGE), requires_grad=False)
        self.bias = None if bias is None else Parameter(bias.data.to(STORAGE), requires_grad=False)
        self.scales: Any = None

    def pack(self, weight: Tensor, device: torch.device) -> Tensor:
        """Quantise the full weight on the device; keep its scales, and return all elements of `self.weight`."""
        from bitsandbytes.functional import quantize_4bit

        rounded = weight.to(device, torch.bfloat16).contiguous()
        packed: Tensor
        packed, self.scales = quantize_4bit(
            rounded, compress_statistics=IS_DOUBLE, quant_type=QUANT_TYPE, quant_storage=STORAGE
        )
        return packed.flatten()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _PackedProduct.apply(x.to(torch.bfloat16), self.weight, self.scales, self.bias)  # type: ignore[no-untyped-call]
        return y.to(x.dtype)


class _PackedProduct(torch.autograd.Function):
    """The kernels of bitsandbytes' linear. The packed weight is saved as a parameter, not as a view.

    FSDP2 and ZeRO stage 3 release and gather the memory of a parameter between the forward and the backward pass. A
    view, which bitsandbytes saves, would keep the memory that ZeRO stage 3 releases.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Any, bias: Tensor | None) -> Tensor:
        from bitsandbytes import matmul_4bit

        ctx.save_for_backward(packed)
        ctx.scales = scales
        y: Tensor = matmul_4bit(x, packed, quant_state=scales, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor, None, None, None]:
        from bitsandbytes.functional import dequantize_4bit

        (packed,) = ctx.saved_tensors
        weight: Tensor = dequantize_4bit(packed.view(-1, 1), ctx.scales)
        return y_grad @ weight.to(y_grad.dtype), None, None, None
