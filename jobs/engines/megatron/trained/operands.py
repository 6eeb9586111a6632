"""Memory for operands."""

import torch

from jobs.engines.megatron.fp8.quantize import BF16, FP8
from jobs.engines.megatron.trained.ops import Operand


def empty_operand(num_rows: int, width: int, device: torch.device, to_fp8: bool) -> Operand:
    """Return rows that a kernel is to fill: in FP8 with a scale for each, or in BF16."""
    if not to_fp8:
        return Operand(torch.empty(num_rows, width, dtype=BF16, device=device))
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Operand(values, torch.empty(num_rows, dtype=torch.float32, device=device))
