"""Which layers of a model lie on which GPU of one process: Accelerate's device map of even shares."""

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

from bench.errors import ConfigError


def free_bytes(num_gpus: int) -> list[int]:
    """Return the free memory of the first GPUs that this process sees; it may see more than the plan gives it.

    Raises:
        ConfigError: it sees fewer.
    """
    found = torch.cuda.device_count()
    if found < num_gpus:
        raise ConfigError(
            f"strategy=balanced lays its layers on {num_gpus} GPUs, and this process sees {found}",
            where="engine.huggingface.num_gpus, CUDA_VISIBLE_DEVICES",
            fix=f"set engine.huggingface.num_gpus={found}, or let the process see {num_gpus}",
            rule="HW-03",
        )
    return [torch.cuda.mem_get_info(index)[0] for index in range(num_gpus)]


def device_map(model: PreTrainedModel, free: list[int]) -> dict[str, int]:
    """Return the GPU of each module, layers in their order; the model may be without memory.

    free: of each GPU, in bytes. A layer is never split. Weights alone are counted, as device_map="balanced" does.

    Raises:
        ConfigError: the weights do not fit; Accelerate would put the rest onto the host or a disk, and not train it.
    """
    whole = list(model._no_split_modules)
    room = get_balanced_memory(model, max_memory=dict(enumerate(free)), no_split_module_classes=whole)
    devices = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    if left := [name for name, device in devices.items() if not isinstance(device, int)]:
        raise ConfigError(
            f"the weights do not fit {len(free)} GPUs: {left[0]} and {len(left) - 1} other modules are left over",
            where="engine.huggingface.num_gpus",
            fix="use more GPUs, or a smaller model",
            rule="RUN-03",
        )
    return devices
