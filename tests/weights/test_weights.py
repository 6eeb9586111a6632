"""A Hugging Face folder is converted once, completely and with its record; any other or incomplete model is refused."""

import json
import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import plan_kinds
from bench.contract.checkpoint import Stored
from helpers import ranks
from jobs.tasks import convert

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

RECORDS = "records"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def converted(*argv: str | Path) -> int:
    return convert.main([str(setting) for setting in argv])


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a Hugging Face folder of random tensors, damaged on purpose, and its plan; return plan and folder."""

    def write(*, config: dict[str, Any] | None = None, num_layers: int = 2, fused: bool = False, **changes: Any):
        source = tmp_path / "hf"
        random_folder(source, num_layers=num_layers, fused=fused, config=config or {}, changes=changes)
        plan = tmp_path / "plan.json"
        overrides = (f"model.num_layers={num_layers}", "model.hidden_size=16", "model.ffn_hidden_size=24")
        composed = ranks.compose(tmp_path, "cluster.ranks_per_node=1", *overrides)
        plan.write_text(plan_kinds.dumps(replace(composed, base=None, base_dir=str(source))))
        return plan, source

    return write


def random_folder(folder: Path, *, num_layers: int, fused: bool, config: dict, changes: dict) -> dict[str, Any]:
    """Write config.json and two shards with their index; a tensor that is changed to None is left out."""
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(2)
    shapes = {"model.embed_tokens": (128, 16), "lm_head": (128, 16), "model.norm": (16,)}
    for i in range(num_layers):
        qkv = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16)}
        mlp = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
        shapes |= {f"model.layers.{i}.self_attn.{n}": s for n, s in (qkv | {"o_proj": (16, 16)}).items()}
        shapes |= {f"model.layers.{i}.mlp.{n}": s for n, s in mlp.items()}
        shapes |= {f"model.layers.{i}.{n}_layernorm": (16,) for n in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    for i in range(num_layers if fused else 0):
        near = f"model.layers.{i}.self_attn."
        parts = [tensors.pop(f"{near}{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
        tensors[f"{near}qkv_proj.weight"] = torch.cat(parts)
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    folder.mkdir()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": num_layers} | config))
    return tensors


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.distcp"))}


@pytest.mark.long
def test_fused_qkv_of_mlperf_becomes_the_same_checkpoint(planned: Callable, tmp_path: Path) -> None:
    plan, source = planned()
    assert converted("weights", plan, source, tmp_path / "separate") == 0
    random_folder(tmp_path / "fused_hf", num_layers=2, fused=True, config={"model_type": "custom_llama"}, changes={})
    assert converted("weights", plan, tmp_path / "fused_hf", tmp_path / "fused", "--workers", "2") == 0
    assert content(tmp_path / "fused") == content(tmp_path / "separate") != {}


KILLED = """
import os, signal, sys
from jobs.weights import checkpoint_writer
from jobs.tasks import convert

write = checkpoint_writer.write

def half(pieces):
    yield next(pieces)
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint_writer.write = lambda path, pieces: write(path, half(pieces) if path.name == "layer_002.distcp" else pieces)
sys.exit(convert.main())
"""
"""Converts, and is killed when half of the third layer is written."""


@pytest.mark.trains
def test_a_killed_conversion_resumes(planned: Callable, tmp_path: Path) -> None:
    """Files with a record are kept; a file without one is converted again."""
    num_layers = 5
    plan, source = planned(num_layers=num_layers)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    part = tmp_path / "resumed.part"
    (tmp_path / "killed.py").write_text(KILLED)
    command = ("killed", "weights", str(plan), str(source), str(resumed))
    [(code, output)] = ranks.ended_in(tmp_path, command, [os.environ])
    assert code == -signal.SIGKILL, output
    done = {path.name: path.stat().st_mtime_ns for path in part.glob("*.distcp")}
    assert {"layer_000.distcp", "layer_001.distcp"} <= done.keys() and "layer_002.distcp" not in done
    assert (part / "layer_002.distcp.tmp").exists() and not resumed.exists()
    (part / RECORDS / "layer_001.json").unlink()
    for folder in (whole, resumed):
        assert converted("weights", plan, source, folder) == 0
    assert content(resumed) == content(whole) and len(content(whole)) == num_layers + 2
    kept = {name for name, when in done.items() if (resumed / name).stat().st_mtime_ns == when}
    assert kept == done.keys() - {"layer_001.distcp"}
    assert sorted(p.name for p in resumed.iterdir()) == sorted(p.name for p in whole.iterdir()) and not part.exists()


@pytest.mark.long
def test_the_manifest_has_the_checksums(planned: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan, source = planned(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert converted("weights", plan, source) == 0
    assert converted("weights", plan, source) == 0
    assert "exists already" in capsys.readouterr().out
    folder = source / "megatron_core"
    manifest = json.loads((folder / "manifest.json").read_text())
    for where, files in ((source, manifest["source"]["files"]), (folder, manifest["files"])):
        assert files and all(sha256sum(where / file["path"]) == file["sha256"] for file in files)
    assert manifest["source"]["tensors"] == 2 * 9 + 3
    assert manifest["source"]["left_out"] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert converted("weights", plan, source, tmp_path) == 2
    assert "the folder already has other content" in capsys.readouterr().err
    manifest["model"]["rope_base"] = 500000
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert converted("weights", plan, source) == 2
    assert "the weights do not match the model tiny: rope_base is 500000 instead of 10000" in capsys.readouterr().err


@pytest.mark.long
def test_fp8_and_plain_checkpoints_are_separate(planned: Callable, capsys: pytest.CaptureFixture) -> None:
    plan, source = planned()
    assert converted("weights", plan, source) == converted("weights", plan, source, "--fp8") == 0
    folder, plain = source / "megatron_core_fp8", stored(source / "megatron_core")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["precision"] == "fp8" and "precision" not in json.loads(
        (source / "megatron_core" / "manifest.json").read_text()
    )
    assert all(sha256sum(folder / file["path"]) == file["sha256"] for file in manifest["files"])
    linears = {key for key in plain if ".layers." in key and "layernorm" not in key}
    quantised = stored(folder)
    assert quantised.keys() == {
        *(plain.keys() - linears),
        *(f"{key}_{suffix}" for key in linears for suffix in ("fp8", "scale")),
    }
    for key, numbers in plain.items():
        if key not in linears:
            assert torch.equal(quantised[key], numbers)
            continue
        values, scale = quantised[f"{key}_fp8"], quantised[f"{key}_scale"]
        numbers = numbers.bfloat16().float()
        assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        torch.testing.assert_close(scale[:, 0], numbers.abs().amax((1, 2)) / 448, rtol=0, atol=0)
        assert (
            (values.float() * scale[:, :, None] - numbers).abs() <= numbers.abs() / 16 + scale[:, :, None] / 512
        ).all()
    for flag in ((), ("--fp8",)):
        other = source / ("megatron_core_fp8" if not flag else "megatron_core")
        assert converted("weights", plan, source, other, *flag) == 2
        assert "the folder already has these weights in another precision" in capsys.readouterr().err


def test_rows_that_are_not_multiples_of_a_block_are_refused_for_nf4(
    planned: Callable, capsys: pytest.CaptureFixture
) -> None:
    plan, source = planned()
    assert converted("weights", plan, source, "--nf4") == 2
    assert "rows with a multiple of 64 weights, but the rows of tiny have 16 and 24 weights" in capsys.readouterr().err
    assert not (source / "megatron_core_nf4").exists()


@pytest.mark.long
def test_a_conversion_resumes_only_in_its_own_precision(
    planned: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from jobs.weights import conversion

    plan, source = planned()
    model = plan_kinds.load(plan).config.model
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "finish", lambda conversion: None)
        for stored_as, folder in ((Stored.plain, tmp_path / "other"), (Stored.fp8, tmp_path / "same")):
            conversion.convert(conversion.prepare(source, model, folder, stored=stored_as))
    begun = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "same.part").glob("*.distcp")}
    room = shutil.disk_usage(tmp_path)._replace(free=26_000)  # bytes: in F32 the model has 32,064, with FP8 20,544
    with monkeypatch.context() as patch:
        patch.setattr(conversion.shutil, "disk_usage", lambda path: room)
        assert converted("weights", plan, source, tmp_path / "plain") == 2
        assert "GiB are free" in capsys.readouterr().err
        for folder in ("whole", "other", "same"):
            assert converted("weights", plan, source, tmp_path / folder, "--fp8") == 0
    assert content(tmp_path / "other") == content(tmp_path / "same") == content(tmp_path / "whole") != {}
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "same").glob("*.distcp")} == begun


def stored(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors by name, as torch reads them."""
    from torch.distributed import checkpoint

    known = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(manifest.size, dtype=manifest.properties.dtype) for key, manifest in known.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # because of no_dist
        checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def sha256sum(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


QKV = "model.layers.0.self_attn.k_proj.weight"
CONFIGS = {
    "rope_theta is 500000.0, but tiny has 10000.0": {"rope_theta": 500000.0},
    "'factor': 32.0, ": {"rope_scaling": LLAMA3_ROPE | {"factor": 32.0}},
    "rope_type is yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "low_freq_factor is 2.0 (supported: 1.0)": {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
    "rms_norm_eps is 1e-06, but tiny has 1e-05": {"rms_norm_eps": 1e-6},
    "num_key_value_heads is 4, but tiny has 2": {"num_key_value_heads": None},
    "tie_word_embeddings is True, but tiny has False": {"tie_word_embeddings": True},
    "attention_bias is true (supported: false)": {"attention_bias": True},
    "head_dim is 8, but tiny has 4": {"head_dim": 8},
    "model_type is mistral, but tiny is a llama": {"model_type": "mistral"},
    "model_type in config.json is 'bloom', but runstop's own layers support only custom_llama, gpt2, ": {
        "model_type": "bloom"
    },
    "the weights are quantised (awq), but": {"quantization_config": {"quant_method": "awq"}},
}
TENSORS = {
    "1 of 21 tensors are missing: model.norm.weight": {"model.norm.weight": None},
    "1 of 21 tensors are unknown: model.layers.2.extra": {"model.layers.2.extra": torch.ones(1)},
    f"1 of 21 tensors have another shape: {QKV} has shape (4, 16) instead of (8, 16)": {QKV: torch.ones(4, 16)},
    "the tensors have the dtypes F32, F64, but": {QKV: torch.ones(8, 16, dtype=torch.float64)},
}


@pytest.mark.parametrize("message", [*CONFIGS, *TENSORS])
def test_another_model_is_refused(planned: Callable, capsys: pytest.CaptureFixture, message: str) -> None:
    plan, source = planned(config=CONFIGS.get(message), **TENSORS.get(message, {}))
    assert converted("weights", plan, source) == 2
    assert message in capsys.readouterr().err
    assert not (source / "megatron_core").exists()


def damage_cut(source: Path) -> None:
    path = source / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def damage_missing(source: Path) -> None:
    (source / "model-2.safetensors").unlink()


def damage_twice(source: Path) -> None:
    (source / "model-2.safetensors").write_bytes((source / "model-1.safetensors").read_bytes())


def damage_blob(source: Path) -> None:
    (source / "model-1.safetensors").rename(source / ("0" * 64))
    (source / "model-1.safetensors").symlink_to("0" * 64)


def damage_pickled(source: Path) -> None:
    (source / "model.safetensors.index.json").rename(source / "pytorch_model.bin.index.json")


def damage_config(source: Path) -> None:
    (source / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "a file of the weights is incomplete or damaged"),
        (damage_missing, "1 of 2 files of the model are missing, for example model-2.safetensors"),
        (damage_twice, "is also in the file model-1.safetensors"),
        (damage_blob, "its name in the cache is the SHA-256 0000"),
        (damage_pickled, "the folder contains no *.safetensors"),
        (damage_config, "config.json cannot be read"),
    ],
)
def test_damaged_downloads_are_refused(
    planned: Callable, capsys: pytest.CaptureFixture, damage: Callable, message: str
):
    plan, source = planned()
    damage(source)
    assert converted("weights", plan, source) == 2
    assert message in capsys.readouterr().err
    assert not (source / "megatron_core").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_refused_before_anything_is_written(
    planned: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plan, source = planned()
    with ranks.mounted(tmp_path / "small", "size=24k"):
        assert converted("weights", plan, source, tmp_path / "small" / "out") == 2
        assert "GiB are free, but the checkpoint needs" in capsys.readouterr().err
        assert not content(tmp_path / "small" / "out.part")
    assert converted("weights", plan, source, "/proc/nowhere") == 2
    assert "the converted weights cannot be written into this folder" in capsys.readouterr().err


def test_adapters_of_another_plan_are_refused(planned: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan, _ = planned()
    assert converted("adapters", plan, tmp_path / "peft") == 2
    assert "the adapters do not match this plan" in capsys.readouterr().err
    (tmp_path / "peft").mkdir()
    assert converted("adapters", plan, tmp_path / "peft") == 2
    assert "this folder already exists" in capsys.readouterr().err
