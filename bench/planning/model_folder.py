"""The folder MODEL at planning time: read a model's sizes from its config.json, and compare it with the plan's model.

The plan contains the complete model. The ranks do not read config.json for sizes.
"""

import dataclasses
import hashlib
import re
import shlex
from pathlib import Path

from bench.contract import checkpoint, codec, data_files, families, hugging_face
from bench.contract.model import Model, Weights
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config, EngineName
from bench.errors import ConfigError
from bench.fetch.commands import model_command, or_download
from bench.planning import described_models

READ_FROM = "config.json with SHA-256 "
"""Prefix of model.source of a model that was read from a folder. The path is not part of the model: the same folder may
have another place."""


def read(folder: str | None, *, where: str, engine: EngineName) -> Model:
    """Return the model of a Hugging Face folder; `where` is the key that names the folder.

    engine=huggingface also has models of other families: transformers describes them.

    Raises:
        ConfigError: the folder is not set or missing, has no config.json, or our layers do not have this model.
    """
    fix = f"set MODEL ({where}) to a Hugging Face folder on this machine, or choose another model="
    if (path := expanded(folder)) is None:
        raise ConfigError(
            "model=hf reads the sizes of the model from a folder, but the folder is not set",
            where=f"{where} is {folder or 'null'}",
            fix=fix,
            rule="CFG-06",
        )
    place = Path(path).absolute()
    file = place / hugging_face.CONFIG
    if not file.is_file():
        problem = (
            f"there is no {hugging_face.CONFIG} in this folder" if place.is_dir() else "this folder does not exist"
        )
        if (place.parent / hugging_face.CONFIG).is_file():  # its conversion
            fix = f"set MODEL ({where}) to the parent folder: {place.parent}"
        elif (place / checkpoint.METADATA).is_file():
            fix = "export the checkpoint of a trial to a Hugging Face folder OUT, and set MODEL to OUT: "
            fix += f"python -m jobs.tasks.convert export {shlex.quote(str(place))} OUT --tokenizer FOLDER"
        raise ConfigError(
            f"model=hf reads the sizes of the model from a folder, but {problem}",
            where=str(place),
            fix=fix,
            rule="CFG-06",
        )
    values = hugging_face.config(place)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    named = {"name": name_of(place), "source": f"{READ_FROM}{digest}", "where": str(file)}
    if engine is EngineName.huggingface and not families.supports(values, engine):
        return described_models.read(file.read_text(encoding="utf-8"), **named)
    return families.model_of(values, **named)


def name_of(folder: Path) -> str:
    """Return a name for a folder's model: the folder's own, or the repository's in the cache of Hugging Face's hub."""
    repository = re.fullmatch(r"models--(?:.*--)?(.+)", folder.parent.parent.name)
    name = repository[1] if repository and folder.parent.name == "snapshots" else folder.name
    return re.sub(r"[^A-Za-z0-9_.+-]", "-", name).lstrip("-.+") or "model"


def is_read(model: Model) -> bool:
    """Return whether the sizes were read from a folder."""
    return model.source.startswith(READ_FROM)


def check(plan: Plan) -> None:
    """Refuse a plan whose folder of weights is readable here, and has other weights than its model or no tokenizer.

    A folder that does not exist on this machine is not checked: the job's machine may have it.

    Raises:
        ConfigError: config.json or the headers of the weights do not match the model, or the tokenizer is not usable.
    """
    config, inputs = plan.config, plan.inputs
    path = None if inputs.checkpoint_is_created else expanded(inputs.checkpoint)
    if path is None or config.model.weights is Weights.random or not checkpoint.is_source(Path(path)):
        return
    check_weights(Path(path), config)
    if reads_tokenizer(config):
        check_tokenizer(Path(path), config)


def check_weights(folder: Path, config: Config) -> None:
    """Refuse a Hugging Face folder whose config.json or headers of the weights do not match the model.

    Raises:
        ConfigError: they differ, or something is missing or damaged.
    """
    if (checkpoint.located(folder, config) / checkpoint.METADATA).exists():  # converted, with a manifest of its own
        values = hugging_face.config(folder)
        families.check(values, config.model, where=str(folder / hugging_face.CONFIG))
    else:
        try:
            hugging_face.check(folder, config.model)
        except hugging_face.MissingWeightsError as error:
            fix = error.fix + or_download(model_command(folder, config.model))
            raise ConfigError(error.what, where=error.where, fix=fix, rule="CFG-06") from error


def reads_tokenizer(config: Config) -> bool:
    """Return whether the run uses the tokenizer of the model's folder."""
    data, serving = config.data, config.task.serving
    reads_text = data is not None and data.needs_model_folder
    return (
        reads_text or config.task.generation is not None or (serving is not None and serving.server.tokenizer is None)
    )


def check_tokenizer(folder: Path, config: Config) -> None:
    """Refuse a folder without a tokenizer that this version reads.

    Raises:
        ConfigError: tokenizer.json is missing, damaged or has other ids than the model, or has no end of a document.
    """
    path = data_files.find_tokenizer(folder)
    data_files.check_vocabulary(path, data_files.num_ids(path), config.model.vocab_size)
    needs_end = config.task.serving is None
    if needs_end and not data_files.has_end(path):
        raise data_files.unnamed_token(path, "eos_token")


def values(model: Model) -> dict[str, object]:
    """Return a model's fields as a config has them, without the choice of its weights and what transformers says."""
    fields = (field.name for field in dataclasses.fields(model))
    return {name: codec.plain(getattr(model, name)) for name in fields if name not in ("weights", "described")}
