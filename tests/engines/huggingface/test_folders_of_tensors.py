"""Folders of transformers: what is refused, which files are written, and initial weights."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.contract.described_model import Described
from bench.errors import ConfigError
from helpers import described_folders
from helpers.huggingface_runs import needed

needed()

from jobs.engines.huggingface.described import transformers_folder  # noqa: E402
from jobs.engines.huggingface.described.describe import describe  # noqa: E402

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return described_folders.write(tmp_path_factory.mktemp("models"), "qwen3_moe", max_shard_size="1GB")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder."""
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def described(folder: Path) -> Described:
    model = describe((folder / "config.json").read_text(), None, where="config.json")
    assert model.described is not None
    return model.described


def changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FIX = "download the model again, or set MODEL to the folder of another model"
HEAD, NORM = "lm_head.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x.pop(NORM), f"1 of 25 tensors are missing, such as {NORM}"),
        (lambda x: (x.pop(HEAD), x.pop(NORM)), f"2 of 25 tensors are missing, such as {NORM}"),
        (lambda x: x.update(other=torch.zeros(2)), "the model class Qwen3MoeForCausalLM has no tensor other"),
        (
            lambda x: x.update({HEAD: torch.zeros(3, 32)}),
            f"{HEAD} has the shape (3, 32), but config.json requires (128, 32)",
        ),
    ],
    ids=["missing", "two missing", "unknown", "shape"],
)
def test_a_folder_with_other_tensors_is_refused(folder: Path, change: Callable[..., Any], what: str) -> None:
    known = described(folder)
    changed(folder, change)
    with pytest.raises(ConfigError) as error:
        transformers_folder.Folder(folder, known).read(HEAD, (128, 32))
    got = error.value
    assert (got.what, got.where, got.fix, got.rule) == (what, str(folder), FIX, "CFG-06")


def test_a_table_of_rope_in_the_files_is_ignored(folder: Path) -> None:
    known = described(folder)
    head = load_file(folder / "model.safetensors")[HEAD]
    changed(folder, lambda x: x.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert torch.equal(transformers_folder.Folder(folder, known).read(HEAD, (128, 32)), head)


@pytest.mark.parametrize("max_bytes", [10**9, 90_000, 1])
def test_files_are_those_of_save_pretrained(folder: Path, tmp_path: Path, max_bytes: int) -> None:
    """Experts are single tensors in the files; a layer is never split."""
    known, out = described(folder), tmp_path / "out"
    out.mkdir()
    opened = transformers_folder.Folder(folder, known)
    model = transformers_folder.meta_model(known)
    read = [(name, opened.read(name, tuple(p.shape))) for name, p in model.named_parameters()]
    assert [tuple(tensor.shape) for _, tensor in read] == [tuple(p.shape) for p in model.parameters()]
    transformers_folder.write(out, known, iter(read), dtype="float32", max_bytes=max_bytes)
    expected = load_file(folder / "model.safetensors")
    # embedding 16,384 bytes; layer 0 and layer 1 62,336 each; norm 128; head 16,384
    files = {10**9: [157_568], 90_000: [78_720, 78_848], 1: [16_384, 62_336, 62_336, 128, 16_384]}[max_bytes]
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    assert sorted(path.name for path in out.glob("*")) == sorted(
        ["config.json", *names, *(["model.safetensors.index.json"] if len(files) > 1 else [])]
    )
    parts = [load_file(out / name) for name in names]
    assert [sum(tensor.nbytes for tensor in part.values()) for part in parts] == files
    stored = {name: tensor for part in parts for name, tensor in part.items()}
    assert stored.keys() == expected.keys() and all(torch.equal(stored[name], expected[name]) for name in expected)
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index == {
            "metadata": {},
            "weight_map": {key: n for n, part in zip(names, parts, strict=True) for key in part},
        }
    config = json.loads((folder / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == config | {"dtype": "float32"}


def test_initial_weights_depend_on_the_seed_of_their_module(folder: Path) -> None:
    """Linears and embeddings have transformers' deviation 0.02, norms are 1; random numbers elsewhere stay the same."""
    known, seeds = described(folder), []

    def seed_of(owner: str) -> int:
        seeds.append(owner)
        return len(owner)

    torch.manual_seed(4)
    state = torch.get_rng_state()
    initial = transformers_folder.InitialWeights(known, seed_of, torch.device("cpu"))
    shapes = {name: tuple(p.shape) for name, p in transformers_folder.meta_model(known).named_parameters()}
    values = {name: initial.read(name, shape) for name, shape in shapes.items()}
    assert torch.equal(torch.get_rng_state(), state)
    assert seeds == list(dict.fromkeys(name.rpartition(".")[0] for name in shapes)), "each module once"
    for name, tensor in values.items():
        assert tuple(tensor.shape) == shapes[name] and not tensor.requires_grad
        if tensor.dim() == 1:
            assert re.search("norm", name) and (tensor == 1).all()
        else:
            assert tensor.std() == pytest.approx(0.02, rel=6 / math.sqrt(tensor.numel()) + 0.05), name
    first, second = (f"model.layers.{index}.self_attn.q_proj.weight" for index in range(2))
    assert torch.equal(values[first], values[second]), "the seeds are equal here"
    assert not torch.equal(values[HEAD], values["model.embed_tokens.weight"])
