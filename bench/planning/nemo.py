"""engine=nemo: refuse what NeMo's recipes do not support, and choose the program that runs its trials."""

import dataclasses
from collections.abc import Iterator
from pathlib import PurePosixPath

from bench.contract.families import llama
from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.schema import Config, Device, EngineName, Precision, ProfileKind, Runtime
from bench.contract.task import Kind
from bench.contract.training import MomentPrecision, StartsFrom, Trains
from bench.errors import ConfigError
from bench.planning import engine_block

Refusal = tuple[bool, str, str, str]
"""Whether it is refused, the problem, the config key, the fix."""


def check(config: Config) -> None:
    """Refuse what NeMo's recipes do not support, and an engine.nemo block that contradicts engine.name.

    Raises:
        ConfigError: for the first problem.
    """
    engine_block.check(config, EngineName.nemo)
    if config.engine.nemo is None or config.task.kind is not Kind.train:
        return
    for is_refused, problem, where, fix in (*_model(config), *_recipe(config), *_layout(config), *_launch(config)):
        if is_refused:
            raise ConfigError(f"engine=nemo: {problem}", where=where, fix=f"{fix}, or choose engine=megatron")


def _model(config: Config) -> Iterator[Refusal]:
    m, training = config.model, config.training
    is_gpt, is_llama = _is_gpt(m), llama.FAMILY.has_layers_of(m) and m.head_dim is None
    parts = f"{m.norm.name}, {m.activation.name}, {m.position.name} positions, bias={str(m.bias).lower()}"
    what = f"NeMo has recipes only for Llama 2 and GPT-3, but this model has {parts}"
    yield not (is_gpt or is_llama), what, "model", "choose a Llama 2 or GPT-3 model"
    scaled = m.rope_scaling_factor != 1
    yield scaled, "NeMo's Llama 2 recipe does not scale RoPE", "model.rope_scaling_factor", "choose a Llama-2 model"
    is_pre_training = training.trains is Trains.all and training.starts_from is StartsFrom.random
    what = "NeMo's GPT-3 recipe can only pre-train from random weights"
    yield is_gpt and not is_pre_training, what, "task.training", "choose a task that pre-trains"
    what = "NeMo's recipes do not support QLoRA (adapters on 4-bit weights)"
    yield training.trains is Trains.qlora, what, "task.training.trains", "set task.training.trains=lora"


def _is_gpt(m: Model) -> bool:
    return (m.norm, m.activation, m.position, m.bias) == (Norm.LayerNorm, Activation.gelu, Position.learned, True)


def _recipe(config: Config) -> Iterator[Refusal]:
    r = config.training_recipe
    what = "NeMo's recipes do not support FP8"
    yield config.precision is Precision.fp8, what, "precision", "set precision=bf16"
    what = "NeMo's recipes do not support a document mask"
    yield config.training_data.document_mask, what, "data.document_mask", "set data.document_mask=false"
    what = "NeMo's recipes keep Adam's moments in FP32 and in GPU memory"
    yield r.moments is not MomentPrecision.fp32, what, "recipe.moments", "set recipe.moments=fp32"
    yield r.offload_moments, what, "recipe.offload_moments", "set recipe.offload_moments=false"
    is_saved = config.training.checkpoint_every_steps is not None
    where = "task.training.checkpoint_every_steps"
    yield is_saved, "checkpoints and resuming are not supported", where, f"set {where}=null"


def _layout(config: Config) -> Iterator[Refusal]:
    p = config.parallel
    yield (p.cp or 1) > 1, "context parallelism is not supported", "parallel.cp", "set parallel.cp=1"
    yield p.vpp > 1, "the interleaved pipeline schedule is not supported", "parallel.vpp", "set parallel.vpp=1"
    is_cpu = config.cluster.device is Device.cpu
    what = "sequence parallelism needs Transformer Engine, which needs a GPU"
    yield is_cpu and bool(p.sp), what, "parallel.sp", "set parallel.sp=false"


def _launch(config: Config) -> Iterator[Refusal]:
    is_profiled = config.launch.profile is not ProfileKind.none
    yield is_profiled, "profiling is not supported", "launch.profile", "set launch.profile=none"
    assert config.engine.nemo is not None
    python = config.engine.nemo.python
    is_known = python == "python" or PurePosixPath(python).is_absolute()
    fix = "set NEMO_PYTHON to the absolute path of the python of NeMo's environment, or to `python`"
    yield (
        not is_known,
        f"python is {python!r}, but must be an absolute path, because ranks start in another folder",
        "engine.nemo.python, NEMO_PYTHON",
        fix,
    )


def restricted(config: Config) -> Config:
    """Return the config with its open choices limited to what NeMo's recipes support."""
    if config.nemo is None:
        return config
    p, is_cpu = config.parallel, config.cluster.device is Device.cpu
    return dataclasses.replace(config, parallel=dataclasses.replace(p, cp=1, sp=False if is_cpu else p.sp))


def trial_program(config: Config) -> tuple[str, str]:
    """Return the module of `jobs` that runs a trial, and its interpreter. In a container this is always `python`."""
    if config.nemo is None or config.task.kind is not Kind.train:
        return f"tasks.{config.task.kind.name}", "python"
    return "nemo.train", config.nemo.python if config.container.runtime is Runtime.none else "python"
