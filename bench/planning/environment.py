"""What is set for every rank of a plan: ours, then what the cluster says."""

from bench.contract import transport
from bench.contract.schema import Config, Device

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",
}
"""Set for every rank. Each has one OpenMP thread, because the ranks of a node share its cores. Ranks start in the run
folder, and with PYTHONSAFEPATH (Python 3.11 and later) nothing is imported from there."""
CUDA_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Set on GPUs too: freed memory can then be used for tensors of another size."""
CPU_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}
"""Set on CPUs too: libraries that find a GPU compute there, and every rank would on the first one. It hides AMD's GPUs
as well; an empty value does not. Slurm sets the variable itself where a job asks for GPUs.

Source: CUDA's programming guide, "CUDA environment variables"; ROCm's clr, rocdevice.cpp, Device::init.
"""

ONLY_MEGATRON = "CUDA_DEVICE_MAX_CONNECTIONS"
"""One connection keeps kernels and collectives of tensor parallelism in order; FSDP's collectives want several."""


def of(config: Config) -> dict[str, str]:
    """Return the environment of the ranks of a config."""
    own, is_cuda = config.cluster.environment, config.cluster.device is Device.cuda
    of_device = CUDA_ENVIRONMENT if is_cuda else CPU_ENVIRONMENT
    of_transport = transport.LOGGING if is_cuda and transport.is_asked(own) else {}
    is_peer = config.huggingface is not None
    of_all = {name: value for name, value in ENVIRONMENT.items() if not (is_peer and name == ONLY_MEGATRON)}
    return of_all | of_device | of_transport | own
