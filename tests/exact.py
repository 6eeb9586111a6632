"""Trains with the FP8 layer, but with FP32 numbers where FP8 and BF16 ones were: `python -m tests.exact plan.json --trial 0`.

What is then left of the hand-written passes is their algebra, which must be that of autograd to FP32's precision.
"""

import torch

from jobs.megatron import cpu

cpu.install()  # before what looks for a GPU

from jobs import train  # noqa: E402
from jobs.megatron import model  # noqa: E402
from jobs.megatron.fp8 import layer, linear, reference  # noqa: E402

if __name__ == "__main__":
    layer.ops = reference
    for module, names in {reference: ("FP8", "BF16"), linear: ("FP8",)}.items():
        for name in names:
            setattr(module, name, torch.float32)
    cpu.install = lambda: None  # once is enough
    model._dtype = lambda plan: torch.float32
    train.main()
