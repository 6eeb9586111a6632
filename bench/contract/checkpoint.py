"""What converted weights say about themselves, and where they lie. Ranks read it too: the standard library only."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from bench.contract import run_files
from bench.contract.model import Model
from bench.contract.schema import Config, Precision
from bench.contract.training import MomentPrecision, Trains
from bench.errors import ConfigError


class Stored(Enum):
    """How a checkpoint holds the linears of the layers."""

    plain = "plain"
    fp8 = "fp8"
    nf4 = "nf4"


CONVERTED, CONVERTED_FP8, CONVERTED_NF4 = "megatron_core", "megatron_core_fp8", "megatron_core_nf4"
FOLDERS = {Stored.plain: CONVERTED, Stored.fp8: CONVERTED_FP8, Stored.nf4: CONVERTED_NF4}
"""The folders inside a Hugging Face folder that its conversions go to, unless another one is named."""
MANIFEST = "manifest.json"
SOURCE, METADATA = "config.json", "metadata.json"
"""What a Hugging Face folder has, and a checkpoint of megatron-core."""
STEP = "step_"
"""What stands before the number of the step in a checkpoint's name; one that is not there as a whole ends otherwise."""
KEPT = 2
"""The checkpoints of a trial that are kept; while the next one is written there is one more."""
MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "vocab_size",
    "norm_epsilon",
    "rope_base",
    "rope_scaling_factor",
    "tied_embeddings",
)
"""What makes a Llama compute something else, and what shapes alone would not always tell."""


def steps(folder: Path) -> list[int]:
    """Return the steps of a trial's checkpoints that are there as a whole, the newest first."""
    numbers = (path.name.removeprefix(STEP) for path in folder.glob(f"{STEP}*"))
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def newest(run: Path, trial: int) -> int | None:
    """Return the step of a trial's newest checkpoint; None if it has none."""
    return next(iter(steps(run / run_files.checkpoints(trial))), None)


def state_bytes(num_weights: int, moments: MomentPrecision) -> int:
    """Return the size of a training state: master weights in FP32 and two moments, of each weight that is trained."""
    return num_weights * (4 + 2 * (4 if moments is MomentPrecision.fp32 else 2))


def wanted(config: Config) -> Stored:
    """Return how the engine holds the linears, which is the smallest way to store them."""
    if config.task.generation is not None and config.task.generation.nf4:
        return Stored.nf4
    if config.task.generation is not None:
        return Stored.fp8 if config.precision is Precision.fp8 else Stored.plain
    if config.training.trains is Trains.qlora:
        return Stored.nf4
    is_frozen = config.training.trains is not Trains.all
    return Stored.fp8 if config.precision is Precision.fp8 and is_frozen else Stored.plain


def is_source(folder: Path) -> bool:
    """Return whether this is a Hugging Face folder; conversions may lie in it."""
    return (folder / SOURCE).exists() and not (folder / METADATA).exists()


def located(folder: Path, config: Config) -> Path:
    """Return the folder of the checkpoint: this one or, for a Hugging Face folder, its default conversion.

    If there are several conversions, this is the one in the type that the engine computes from. engine=huggingface
    reads the Hugging Face folder itself.
    """
    if not is_source(folder) or config.huggingface is not None:
        return folder
    own = folder / FOLDERS[wanted(config)]
    return own if own.exists() else folder / CONVERTED


def first_file(folder: Path, config: Config) -> Path:
    """Return the file that says what the checkpoint is, wherever it lies."""
    there = located(folder, config)
    return there / (SOURCE if is_source(there) else METADATA)


def manifest(folder: Path) -> dict[str, Any]:
    """Return what a conversion says of itself; nothing where there is no manifest of ours."""
    try:
        record = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def stored(folder: Path) -> Stored:
    """Return how a checkpoint holds the linears, by its manifest."""
    precision = manifest(folder).get("precision")
    return next((kind for kind in Stored if kind.name == precision), Stored.plain)


def require(folder: Path, config: Config) -> None:
    """Raise an error unless a checkpoint fits this model and precision; without a manifest nothing is checked.

    Raises:
        ConfigError: it was converted for another model, or to FP8 or NF4 and the run does not take that.
    """
    require_model(folder, config.model)
    found = stored(folder)
    if found is Stored.plain or found is wanted(config):
        return
    if config.task.generation is not None:
        takes = "precision=fp8" if found is Stored.fp8 else "task.generation.nf4=true"
        raise ConfigError(
            f"the weights are in {found.name.upper()}, and the task wants {wanted(config).name.upper()}",
            where=str(folder),
            fix=f"set {takes}, or point MODEL at a conversion that was made without --{found.name}",
        )
    trains = config.training.trains
    what = f"precision is {config.precision.name}" if found is Stored.fp8 else f"trains is {trains.name}"
    if found is Stored.fp8 and trains is Trains.qlora:
        what = "4-bit weights are not made of FP8"
    elif found is Stored.fp8 and trains is Trains.all:
        what = "trains is all: only frozen weights may be in FP8"
    raise ConfigError(
        f"the weights are in {found.name.upper()}, and {what}",
        where=str(folder),
        fix=f"set {_TAKES[found]}, or point MODEL at a conversion that was made without --{found.name}",
    )


_TAKES = {Stored.fp8: "precision=fp8 with task.training.trains=lora", Stored.nf4: "task.training.trains=qlora"}


def model_of(model: Model) -> dict[str, Any]:
    """Return what a manifest says of a model."""
    return {name: getattr(model, name) for name in MODEL_FIELDS}


def require_model(folder: Path, model: Model) -> None:
    """Do nothing if a checkpoint was converted for this model, or is one that has no manifest of ours.

    Raises:
        ConfigError: it was converted for another one.
    """
    try:
        converted = manifest(folder)["model"]
        wrong = [
            f"{name} {converted[name]} instead of {want}"
            for name, want in model_of(model).items()
            if converted[name] != want
        ]
    except (KeyError, TypeError):
        return
    if wrong:
        raise ConfigError(
            f"these are not the weights of {model.name}: {', '.join(wrong)}",
            where=str(folder),
            fix="choose the model= that they were converted for, or convert other weights",
        )
