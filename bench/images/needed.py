"""Which image of containers/build.sh a plan's ranks need, and what another image lacks. Nothing is looked up."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.contract.engine import NEMO, Attention, HuggingFace, Strategy
from bench.contract.plan import Plan
from bench.contract.schema import Config, Device, GpuVendor, Runtime
from bench.contract.training import Trains
from bench.rules.finding import Finding, broken

MODULES = {"megatron.core": "megatron-core", "flash_attn": "flash-attn", "mlperf_loadgen": "mlcommons-loadgen"}
"""The packages of modules that have another name."""
NAMES = {name: f"runstop-{name}" for name in ("train", "huggingface", "nemo", "rocm", "serve")}
"""The names of the images, by the argument of containers/build.sh. Source: containers/pins.env."""
FLASH = "flash_attn"


@dataclass(frozen=True, slots=True)
class Needed:
    """An image: the arguments of containers/build.sh, and the packages in it that the plan's ranks import."""

    build: str
    packages: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the image, as in its description and in registries."""
        return NAMES[self.build.split()[0]]


def huggingface_modules(config: Config, huggingface: HuggingFace) -> Iterator[str]:
    """Yield the modules that ranks of engine=huggingface import for a config."""
    yield from ("transformers", "accelerate")
    generation, training = config.task.generation, config.task.training
    if training is not None and training.trains is not Trains.all:
        yield "peft"
    if generation is not None and generation.nf4 or training is not None and training.trains is Trains.qlora:
        yield "bitsandbytes"
    if huggingface.strategy is Strategy.deepspeed:
        yield "deepspeed"
    if huggingface.attention is Attention.flash_attention_2:
        yield FLASH


def needed(config: Config) -> Needed | None:
    """Return the image of a config; None if there is none: for engine=megatron on AMD's GPUs, and for a program."""
    gpu, task = config.cluster.gpu, config.task
    is_amd = config.cluster.device is Device.cuda and gpu is not None and gpu.vendor is GpuVendor.amd
    if task.serving is not None:
        return None if is_amd else Needed(f"serve {task.serving.server.name.name}", ("mlcommons-loadgen",))
    if config.program is not None:
        return None
    if config.nemo is not None:
        return None if is_amd else Needed("nemo", (NEMO,))
    if config.huggingface is not None and (task.training or task.generation):
        modules = huggingface_modules(config, config.huggingface)
        packages = tuple(MODULES.get(module, module) for module in modules if module != FLASH)
        return Needed("rocm" if is_amd else "huggingface", packages)
    return None if is_amd else Needed("train", ("megatron-core",))


def runs_in_image(plan: Plan) -> bool:
    """Return whether the ranks run in a container image."""
    cluster = plan.config.cluster
    return plan.config.container.runtime is not Runtime.none or cluster.kubernetes is not None


def of_marker(config: Config, marker: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield the packages that an image lacks by its description, /etc/runstop-image.json."""
    wanted, versions = needed(config), marker.get("versions")
    if wanted is None or not isinstance(versions, dict):
        return
    if missing := [name for name in wanted.packages if name not in versions]:
        yield _lacking(str(marker.get("name", "the image")), missing, wanted, where)


def of_name(config: Config, image: str, where: str) -> Iterator[Finding]:
    """Yield whether an image of runstop is for another engine, by its reference: REGISTRY/runstop-train:TAG."""
    wanted = needed(config)
    name = image.partition("@")[0].rsplit("/", 1)[-1].rsplit("#", 1)[-1].partition(":")[0]
    if wanted is not None and name in NAMES.values() and name != wanted.name:
        yield _lacking(name, wanted.packages, wanted, where)


def _lacking(name: str, missing: tuple[str, ...] | list[str], wanted: Needed, where: str) -> Finding:
    fix = f"run `containers/build.sh {wanted.build}` to build the image {wanted.name}, and use this image"
    return broken("RUN-08", f"the image {name} does not contain {', '.join(missing)}", where, fix=fix)
