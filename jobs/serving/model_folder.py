"""The model folder of a server: the site's, a copy of it without end-of-sequence tokens, or one with random weights."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.contract import families, plan_paths
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Precision
from bench.contract.serving import Server
from bench.errors import ConfigError

CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
)
STD = 0.02
"""Standard deviation of random weights. Source: Llama's initializer_range."""


def prepared(plan: ServingPlan, server: Server, folder: Path, *, seed: int) -> Path | None:
    """Return the folder that the server loads; None for a server that runs elsewhere.

    Raises:
        ConfigError: the plan's folder contains no model.
    """
    if server.url is not None:
        return None
    if plan.base_dir is None:
        write_random(plan, folder, seed=seed)
        return folder
    source = Path(plan_paths.expanded(plan.base_dir) or plan.base_dir).absolute()
    if not (source / CONFIG).is_file():
        raise ConfigError(
            "the folder contains no Hugging Face model",
            where=str(source),
            fix="set MODEL to a folder with config.json, weights and tokenizer.json, or set model.weights=random",
            rule="CFG-06",
        )
    return _without_end(source, folder) if server.removes_eos else source


def _without_end(source: Path, folder: Path) -> Path:
    """Return a folder of links to the model, whose configs have no end-of-sequence token."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in (CONFIG, GENERATION, TOKENIZER_CONFIG):
            (folder / path.name).symlink_to(path)
    for name, key in ((CONFIG, "eos_token_id"), (GENERATION, "eos_token_id"), (TOKENIZER_CONFIG, "eos_token")):
        settings: dict[str, Any] = {}
        if (source / name).is_file():
            settings = json.loads((source / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: None}, indent=1))
    return folder


def write_random(plan: ServingPlan, folder: Path, *, seed: int) -> None:
    """Write a model of the plan's shape with random weights, and a tokenizer with one word per token."""
    import torch
    from safetensors.torch import save_file

    model, dtype = plan.config.model, torch.float32 if plan.config.precision is Precision.fp32 else torch.bfloat16
    family = families.of_model(model)
    folder.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for weight in family.weights(model):
        file = f"model-{0 if weight.layer is None else 1 + weight.layer:05}.safetensors"
        files.setdefault(file, {}).update(weight.sources)

    def write(number: int, file: str) -> None:  # torch samples in one thread; a 7B model needs several
        generator, tensors = torch.Generator().manual_seed(seed * len(files) + number), {}
        for name, shape in files[file].items():
            weight = torch.empty(shape, dtype=dtype)
            tensors[name] = weight.fill_(1) if "norm" in name else weight.normal_(std=STD, generator=generator)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, range(len(files)), files))
    index = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    settings = family.config_of(model) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(settings | {"bos_token_id": None, "eos_token_id": None}, indent=1))
    (folder / GENERATION).write_text(json.dumps({"do_sample": False}))
    _write_tokenizer(folder, size=model.vocab_size, longest=model.max_seq_length)


def _write_tokenizer(folder: Path, *, size: int, longest: int) -> None:
    """Write a tokenizer whose token n is the word wn."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / TOKENIZER))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))
