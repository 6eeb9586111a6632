"""What a config says of Slurm."""

from dataclasses import dataclass, field
from enum import Enum


class GpuRequest(Enum):
    """How this site's Slurm is asked for GPUs."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    gres_typed = "gres_typed"
    none = "none"


@dataclass(slots=True, kw_only=True)
class Slurm:
    """Settings of the site, which go into the script, and of one user, which go only onto sbatch's command line."""

    partition: str | None = None
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    gpu_type: str | None = None
    """As `scontrol show node` has it (Gres=gpu:h100:8); for gpu_request=gres_typed."""
    exclusive: bool = True
    """Whole nodes, with all of their memory."""
    cpus_per_rank: int | None = None
    max_walltime_min: int | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    arguments: list[str] = field(default_factory=list)
    """More for sbatch, such as --exclude=dgx-7 or --time=20."""
