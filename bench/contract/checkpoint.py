"""Folders and manifests of converted checkpoints. Standard library only: ranks import it."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from bench.contract import codec, run_files
from bench.contract.checksums import MANIFEST as MANIFEST
from bench.contract.model import Model
from bench.contract.schema import Config, Precision
from bench.contract.training import MomentPrecision, Trains
from bench.errors import ConfigError


class Stored(Enum):
    """How a checkpoint stores the linears of the layers."""

    plain = "plain"
    fp8 = "fp8"
    nf4 = "nf4"


CONVERTED, CONVERTED_FP8, CONVERTED_NF4 = "megatron_core", "megatron_core_fp8", "megatron_core_nf4"
FOLDERS = {Stored.plain: CONVERTED, Stored.fp8: CONVERTED_FP8, Stored.nf4: CONVERTED_NF4}
"""Default subfolders for conversions inside a Hugging Face folder."""
SOURCE, METADATA = "config.json", "metadata.json"
"""Files that identify a Hugging Face folder, and a megatron-core checkpoint."""
STEP = "step_"
"""Prefix of a checkpoint's name before the step number; names of incomplete checkpoints have a suffix."""
NUM_KEPT = 2
"""Checkpoints kept per trial; there is one more while the next one is written."""
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
"""Fields that must match between a checkpoint and the model; shapes alone do not show all differences."""
LATER_FIELDS = {"head_dim": None, "qkv_bias": False, "qk_norm": False, "experts": None}
"""The same, with the values that a manifest leaves out."""


def steps(folder: Path) -> list[int]:
    """Return the steps of a trial's complete checkpoints, newest first."""
    numbers = (path.name.removeprefix(STEP) for path in folder.glob(f"{STEP}*"))
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def newest(run: Path, trial: int) -> int | None:
    """Return the step of a trial's newest checkpoint; None if it has none."""
    return next(iter(steps(run / run_files.checkpoints(trial))), None)


def state_bytes(num_weights: int, moments: MomentPrecision) -> int:
    """Return the size of a training state: FP32 master weights and two moments per trained weight."""
    return num_weights * (4 + 2 * (4 if moments is MomentPrecision.fp32 else 2))


def preferred(config: Config) -> Stored:
    """Return the storage of the linears that the engine uses in memory; it is also the smallest file format."""
    if config.task.generation is not None and config.task.generation.nf4:
        return Stored.nf4
    if config.task.generation is not None:
        return Stored.fp8 if config.precision is Precision.fp8 else Stored.plain
    if config.training.trains is Trains.qlora:
        return Stored.nf4
    is_frozen = config.training.trains is not Trains.all
    return Stored.fp8 if config.precision is Precision.fp8 and is_frozen else Stored.plain


def is_source(folder: Path) -> bool:
    """Return whether this is a Hugging Face folder, which may contain conversions."""
    return (folder / SOURCE).exists() and not (folder / METADATA).exists()


def located(folder: Path, config: Config) -> Path:
    """Return the folder of the checkpoint: this one or, for a Hugging Face folder, its default conversion.

    Among several conversions this is the one in the engine's precision. engine=huggingface and servers read the Hugging
    Face folder itself.
    """
    if not is_source(folder) or config.huggingface is not None or config.task.serving is not None:
        return folder
    own = folder / FOLDERS[preferred(config)]
    return own if own.exists() else folder / CONVERTED


def first_file(folder: Path, config: Config) -> Path:
    """Return the checkpoint's config.json or metadata.json."""
    place = located(folder, config)
    return place / (SOURCE if is_source(place) else METADATA)


def manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a conversion; empty if there is none."""
    try:
        record = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def stored(folder: Path) -> Stored:
    """Return how a checkpoint stores the linears, by its manifest."""
    precision = manifest(folder).get("precision")
    return next((kind for kind in Stored if kind.name == precision), Stored.plain)


def require(folder: Path, config: Config) -> None:
    """Refuse a checkpoint for another model or precision; a folder without a manifest is not checked.

    Raises:
        ConfigError: it was converted for another model, or to FP8 or NF4, which this run cannot use.
    """
    require_model(folder, config.model)
    precision = stored(folder)
    if precision is Stored.plain or precision is preferred(config):
        return
    if config.task.generation is not None:
        needed_setting = "precision=fp8" if precision is Stored.fp8 else "task.generation.nf4=true"
        raise ConfigError(
            f"the weights are stored in {precision.name.upper()}, but the task needs {_WEIGHTS[preferred(config)]}",
            where=str(folder),
            fix=f"set {needed_setting}, or set MODEL to weights that were converted without --{precision.name}",
        )
    trains = config.training.trains
    conflict = f"task.training.trains={trains.name} cannot use 4-bit weights"
    if precision is Stored.fp8:
        conflict = f"precision={config.precision.name} cannot use FP8 weights"
    if precision is Stored.fp8 and trains is Trains.qlora:
        conflict = "task.training.trains=qlora needs 4-bit weights, which cannot be converted from FP8"
    elif precision is Stored.fp8 and trains is Trains.all:
        conflict = "task.training.trains=all trains all weights, and only frozen weights may be in FP8"
    raise ConfigError(
        f"the weights are stored in {precision.name.upper()}, but {conflict}",
        where=str(folder),
        fix=f"set {_NEEDED_SETTINGS[precision]}, or set MODEL to weights that were converted without "
        f"--{precision.name}",
    )


_WEIGHTS = {Stored.plain: "unquantised weights", Stored.fp8: "FP8 weights", Stored.nf4: "4-bit weights (NF4)"}
_NEEDED_SETTINGS = {
    Stored.fp8: "precision=fp8 with task.training.trains=lora",
    Stored.nf4: "task.training.trains=qlora",
}


def model_of(model: Model) -> dict[str, Any]:
    """Return a model's fields for a manifest."""
    later = {name: _of_weights(codec.plain(getattr(model, name))) for name in LATER_FIELDS}
    given = {name: value for name, value in later.items() if value != LATER_FIELDS[name]}
    return {name: getattr(model, name) for name in MODEL_FIELDS} | given


def _of_weights(value: Any) -> Any:
    """Return a model's field without the coefficient of the experts' loss, which is of the training."""
    return {k: v for k, v in value.items() if k != "aux_loss_coef"} if isinstance(value, dict) else value


def require_model(folder: Path, model: Model) -> None:
    """Refuse a checkpoint that was converted for another model; one without a manifest is accepted.

    Raises:
        ConfigError: the model differs.
    """
    try:
        converted = LATER_FIELDS | manifest(folder)["model"]
        differences = [
            f"{name} is {converted[name]} instead of {expected}"
            for name, expected in (LATER_FIELDS | model_of(model)).items()
            if _of_weights(converted[name]) != expected
        ]
    except (KeyError, TypeError):
        return
    if differences:
        raise ConfigError(
            f"the weights do not match the model {model.name}: {', '.join(differences)}",
            where=str(folder),
            fix=f"set model= to the model of these weights, or convert the weights of {model.name}",
        )
