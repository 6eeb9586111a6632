"""Select the implementation of the layers' operations by device: Triton on a GPU, plain torch on a CPU.

Triton need not be installed without a GPU: modules that use it are imported here, once the device is known.
"""

import torch

from bench.contract.schema import Precision
from bench.contract.training import Trains
from jobs.engines.megatron.frozen.ops import Fp8Ops
from jobs.engines.megatron.quantize import BF16, FP8
from jobs.engines.megatron.trained.ops import TrainedOps


def frozen_ops(device: torch.device, precision: Precision, trains: Trains) -> Fp8Ops:
    """Return the operations of layers with a frozen base and adapters."""
    is_fp8, is_nf4 = precision is Precision.fp8, trains is Trains.qlora
    if device.type == "cuda":
        from jobs.engines.megatron.frozen.gpu_ops import GpuOps, PlainGpuOps

        return GpuOps() if is_fp8 else PlainGpuOps(is_nf4)
    from jobs.engines.megatron.frozen.torch_ops import TorchOps

    return TorchOps(FP8 if is_fp8 else None, BF16, is_nf4)


def trained_ops(device: torch.device, precision: Precision) -> TrainedOps:
    """Return the operations of layers that train all weights. FP32 uses torch on any device."""
    is_fp8 = precision is Precision.fp8
    if device.type == "cuda" and precision is not Precision.fp32:
        from jobs.engines.megatron.trained.gpu_ops import Bf16GpuOps, Fp8GpuOps

        return Fp8GpuOps() if is_fp8 else Bf16GpuOps()
    from jobs.engines.megatron.trained.torch_ops import Fp8TorchOps, PlainTorchOps

    return Fp8TorchOps() if is_fp8 else PlainTorchOps(torch.float32 if precision is Precision.fp32 else torch.bfloat16)
