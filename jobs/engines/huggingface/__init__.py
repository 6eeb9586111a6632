"""The engine on Hugging Face's libraries: transformers' models, on ranks by Accelerate, FSDP2 or DeepSpeed; PEFT's
LoRA.

Importing this module imports none of these libraries, so that a missing one is reported with how to install it.
"""

from typing import TYPE_CHECKING

from bench.contract.plan_kinds import GenerationPlan, TrainingPlan
from jobs.engines.huggingface.groups import end_ranks, start_ranks
from jobs.engines.huggingface.packages import versions

if TYPE_CHECKING:
    from jobs.engines.huggingface.engine import HuggingFaceEngine
    from jobs.engines.huggingface.generation import HuggingFaceGenerator

__all__ = ["build", "end_ranks", "generator", "start_ranks", "versions"]


def build(plan: TrainingPlan, seed: int) -> "HuggingFaceEngine":
    """Return the engine of a plan with random weights of this seed; `start_ranks` has been called."""
    from jobs.engines.huggingface.engine import HuggingFaceEngine

    return HuggingFaceEngine(plan, seed)


def generator(plan: GenerationPlan, seed: int) -> "HuggingFaceGenerator":
    """Return the generator of a plan with random weights of this seed; `start_ranks` has been called."""
    from jobs.engines.huggingface.generation import HuggingFaceGenerator

    return HuggingFaceGenerator(plan, seed)
