"""The libraries that a plan needs in addition to torch, and their versions."""

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from bench.contract.engine import Attention, HuggingFace, Strategy
from bench.contract.plan import Plan
from bench.contract.training import Trains
from bench.errors import ConfigError

EXTRA, FLASH_ATTENTION = "pip install 'runstop[huggingface]'", "pip install flash-attn --no-build-isolation"
LOGGED = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "flash_attn")


def settings(plan: Plan) -> HuggingFace:
    """Return the engine's settings; a plan without the block has the defaults."""
    return plan.config.engine.huggingface or HuggingFace()


def require(plan: Plan) -> None:
    """Check that all libraries that the plan needs are installed.

    Raises:
        ConfigError: a library is missing.
    """
    for name, needed_by in needed(plan).items():
        if find_spec(name) is None:
            raise ConfigError(
                f"{needed_by} needs the library {name}, which is not installed",
                where=sys.executable,
                fix=FLASH_ATTENTION if name == "flash_attn" else EXTRA,
            )


def needed(plan: Plan) -> dict[str, str]:
    """Return the modules that a plan needs, each with the setting that needs it."""
    chosen = settings(plan)
    modules = dict.fromkeys(("transformers", "accelerate"), "engine=huggingface") | _needed_by_task(plan)
    if chosen.strategy is Strategy.deepspeed:
        modules["deepspeed"] = "engine.huggingface.strategy=deepspeed"
    if chosen.attention is Attention.flash_attention_2:
        modules["flash_attn"] = "engine.huggingface.attention=flash_attention_2"
    return modules


def _needed_by_task(plan: Plan) -> dict[str, str]:
    if generation := plan.config.task.generation:
        return {"bitsandbytes": "task.generation.nf4=true"} if generation.nf4 else {}
    trains, modules = plan.config.training.trains, {}
    if trains is not Trains.all:
        modules["peft"] = f"task.training.trains={trains.name}"
    if trains is Trains.qlora:
        modules["bitsandbytes"] = "task.training.trains=qlora"
    return modules


def versions() -> Mapping[str, str]:
    """Return the versions of the installed libraries, whether or not this run uses them."""
    installed = {}
    for name in LOGGED:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
