import torch
from jobs.engines.megatron.trained.ops import Operand
def empty_operand(num_rows, width, device, to_fp8): pass
