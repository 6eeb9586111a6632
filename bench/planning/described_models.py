"""The family `transformers`: models that only engine=huggingface has, described by a program that imports transformers.

The planner never imports torch. It runs `python -m jobs.engines.huggingface.described.describe` and keeps the answer in
the user's cache, by config.json, settings, versions and program.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from bench.contract import codec
from bench.contract.atomic_files import write_text
from bench.contract.described_model import Described, ProbeSettings
from bench.contract.model import Model
from bench.contract.schema import Config, Precision
from bench.errors import ConfigError
from bench.planning.estimates import huggingface_memory

PROGRAM = Path("jobs/engines/huggingface/described")
"""The files whose change makes earlier answers invalid."""
LIMIT_S = 600
NEEDED = ("torch", "transformers", "accelerate", "peft")
ROOT = Path(__file__).parents[2]
"""The folder with the packages bench and jobs."""


def read(config_json: str, *, name: str, source: str, where: str) -> Model:
    """Return the model of a config.json as transformers describes it.

    Raises:
        ConfigError: transformers is not installed here, does not know the model, or the model is not supported.
    """
    if "${" in config_json:
        what, fix = "config.json contains ${, which Hydra would read as a variable", "remove ${ from config.json"
        raise ConfigError(what, where=where, fix=fix, rule="CFG-06")
    return dataclasses.replace(_described(config_json, None, where=where), name=name, source=source)


def completed(config: Config) -> Config:
    """Return the config with the adapters by the model's own names and with its layers probed, if it is of this family.

    Raises:
        ConfigError: no linear layer of the model is meant by task.training.lora, or its layers cannot be probed.
    """
    described = config.model.described
    if described is None or config.task.training is None or config.huggingface is None:
        return config
    config = _with_adapters(config, described)
    if not _can_run(config, described):
        return config  # refused by the checks of a plan
    probed = _described(
        described.config_json, _settings(config), where=f"{config.cluster.paths.model}/config.json"
    ).described
    assert probed is not None
    model = dataclasses.replace(config.model, described=dataclasses.replace(described, probe=probed.probe))
    return dataclasses.replace(config, model=model)


def _can_run(config: Config, described: Described) -> bool:
    """Return whether the layers have this plan's attention and its adapters."""
    assert config.huggingface is not None
    known, lora = {one.name for one in described.projections}, config.training.lora
    has_adapters = lora is None or known.issuperset(lora.peft_modules)
    return has_adapters and config.huggingface.attention.name in described.attention_implementations


def _with_adapters(config: Config, described: Described) -> Config:
    """Return the config with PEFT's names of this model in place of megatron-core's, and an A for each linear layer."""
    lora = config.training.lora
    if lora is None:
        return config
    modules = [name for target in lora.target_modules for name in _modules(target, described)]
    if not modules:
        known = ", ".join(one.name for one in described.projections)
        raise ConfigError(
            f"target_modules is {', '.join(lora.target_modules)}, but {described.architecture} has no such layers",
            where="task.training.lora.target_modules",
            fix=f"list one or more of {known} in target_modules",
        )
    own = dataclasses.replace(lora, shared_a=False, target_modules=list(dict.fromkeys(modules)))
    training = dataclasses.replace(config.training, lora=own)
    return dataclasses.replace(config, task=dataclasses.replace(config.task, training=training))


def _modules(target: str, described: Described) -> list[str]:
    """Return the linear layers that a name of megatron-core means in this model; another name is the layer's own."""
    meant = {
        "linear_qkv": (True, False),
        "linear_proj": (True, True),
        "linear_fc1": (False, False),
        "linear_fc2": (False, True),
    }
    if target not in meant:
        return [target]
    return [one.name for one in described.projections if (one.is_attention, one.is_output) == meant[target]]


def _settings(config: Config) -> ProbeSettings:
    hf, lora = config.huggingface, config.training.lora
    assert hf is not None
    is_autocast = huggingface_memory.is_autocast(config, hf)
    low = "float32" if config.precision is Precision.fp32 else "bfloat16"
    return ProbeSettings(
        attention=hf.attention.name if hf.attention.name != "flash_attention_2" else "sdpa",
        trained="float32" if is_autocast else low,
        frozen=low,
        is_autocast=is_autocast,
        lora_rank=lora.rank if lora else 0,
        lora_dropout=lora.dropout if lora else 0.0,
        lora_modules=list(lora.peft_modules) if lora else [],
    )


def _described(config_json: str, settings: ProbeSettings | None, *, where: str) -> Model:
    _require_installed()
    words = [] if settings is None else [json.dumps(codec.plain(settings), sort_keys=True)]
    program = sorted((ROOT / PROGRAM).glob("*.py"))
    parts = [*(path.read_text() for path in program), *(metadata.version(name) for name in NEEDED), config_json, *words]
    cached = _cache() / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.json"
    try:
        return codec.typed(Model, json.loads(cached.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        pass
    answer = _run(config_json, words, where=where)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, json.dumps(codec.plain(answer)))
    except OSError:
        pass  # the next plan asks again
    return answer


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "runstop" / "described_models"


def _require_installed() -> None:
    missing = []
    for name in NEEDED:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise ConfigError(
            "this type of model needs transformers, but these packages are not installed on this machine: "
            f"{', '.join(missing)}",
            where=sys.executable,
            fix="run `pip install 'runstop[huggingface]'`, or plan the run on a machine that has these packages",
        )


def _run(config_json: str, words: list[str], *, where: str) -> Model:
    """Ask the program; its answer is JSON on stdout.

    Raises:
        ConfigError: it refuses the model, or it failed.
    """
    argv = [sys.executable, "-m", "jobs.engines.huggingface.described.describe", "-", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_paths()]), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            argv, input=config_json, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
        )
        answer = json.loads(done.stdout or "null")
        if isinstance(answer, dict) and "refused" in answer:
            refused = answer["refused"]
            raise ConfigError(
                refused["what"], where=refused["where"].replace("config.json", where), fix=refused["fix"], rule="CFG-06"
            )
        return codec.typed(Model, answer)
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, KeyError, AttributeError) as error:
        last = done.stderr.strip().rpartition("\n")[2] if "done" in locals() else str(error)
        raise ConfigError(
            f"transformers cannot describe the model: {last or error}",
            where=where,
            fix="run `python -m jobs.engines.huggingface.described.describe FOLDER` to see the complete error, where "
            "FOLDER contains this config.json",
            rule="CFG-06",
        ) from error


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
