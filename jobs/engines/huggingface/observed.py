"""See which kernel attention takes, by the operations that a forward pass launches."""

from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FUSED = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""By torch's names of the kernels that scaled_dot_product_attention chooses from."""
FLASH_ATTENTION_2 = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward")


class Observed(TorchDispatchMode, AbstractContextManager[Any]):
    """Notes the operations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(func.name().split(".")[0].removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def attention(self, asked: str) -> str:
        """Return the kernel that attention took: a fused one, or for what is made of products and softmax its kind."""
        fused = [name for operation, name in FUSED.items() if operation in self.operations]
        if self.operations.intersection(FLASH_ATTENTION_2):
            fused.append("flash_attention_2")
        if fused:
            return " and ".join(sorted(set(fused)))
        return "math" if asked == "sdpa" else asked
