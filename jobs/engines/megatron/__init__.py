"""The training engine on megatron-core.

Importing this module does not import torch: on a machine without CUDA, megatron-core must be patched first.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.contract.schema import Device
from jobs.engines.megatron.groups import end_ranks, start_ranks

if TYPE_CHECKING:
    from bench.contract.plan_kinds import GenerationPlan, TrainingPlan
    from jobs.engines.generation import Generator
    from jobs.engines.megatron.engine import MegatronEngine
    from jobs.local_sgd.engine import LocalSgdTraining
    from jobs.local_sgd.groups import Groups

__all__ = ["build", "end_ranks", "generator", "local_sgd", "start_ranks", "versions"]


def build(plan: "TrainingPlan", seed: int) -> "MegatronEngine":
    """Return the engine of a plan with random weights of this seed; `start_ranks` has been called."""
    from jobs.engines.megatron.engine import MegatronEngine

    return MegatronEngine(plan, seed)


def generator(plan: "GenerationPlan", seed: int) -> "Generator":
    """Return the generator of a plan with random weights of this seed; `start_ranks` has been called.

    Raises:
        ConfigError: the model is not of Llama's architecture, or TP cannot split it.
    """
    import torch
    from megatron.core import parallel_state

    from jobs.engines.megatron.generation import ranks
    from jobs.engines.megatron.generation.generator import MegatronGenerator

    is_gpu = plan.config.cluster.device is Device.cuda
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    of_replica = ranks.connect(plan, parallel_state.get_tensor_model_parallel_group(), device)
    return MegatronGenerator(plan, seed, ranks=of_replica, device=device)


def local_sgd(engine: "MegatronEngine", plan: "TrainingPlan", groups: "Groups") -> "LocalSgdTraining":
    """Return the local SGD of this rank's group; `plan` is that of all groups."""
    from jobs.local_sgd.engine import LocalSgdTraining

    return LocalSgdTraining(engine, plan, groups)


def versions() -> Mapping[str, str]:
    """Return the versions of torch and megatron-core."""
    import megatron.core
    import torch

    return {"torch": torch.__version__, "megatron_core": megatron.core.__version__}
