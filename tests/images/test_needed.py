"""Which image the ranks of a plan need, and how a wrong one is refused: by name, and by its description."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench import preflight
from bench.backends.slurm import checks as slurm_checks
from bench.console import plan as plan_sheets
from bench.contract.plan import Plan
from bench.images import needed, store
from bench.planning import compose
from bench.rules.check import Subject
from helpers.paths import ROOT

HF = "engine=huggingface"
MI300X = ("cluster=kubernetes_mi300x", "model.weights=random")
ON_PODS = ("cluster=kubernetes", "model.weights=random")


def planned(*words: str) -> Plan:
    return compose.compose(list(words))


def test_the_names_are_those_of_the_pins() -> None:
    pins = dict(line.split("=", 1) for line in (ROOT / "containers/pins.env").read_text().splitlines() if "=" in line)
    assert {kind: pins[f"{kind.upper()}_NAME"] for kind in needed.NAMES} == needed.NAMES
    assert {path.stem for path in (ROOT / "containers").glob("*.Dockerfile")} == set(needed.NAMES)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "build", "packages"),
    [
        (("task=lora_7b", *ON_PODS), "train", ("megatron-core",)),
        (("task=lora_7b", HF, *ON_PODS), "huggingface", ("transformers", "accelerate", "peft")),
        (
            ("task=qlora_7b", HF, "engine.huggingface.strategy=deepspeed", *ON_PODS),
            "huggingface",
            ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed"),
        ),
        (("task=lora_8b", HF, *MI300X), "rocm", ("transformers", "accelerate", "peft")),
        (("task=pretrain_7b", "engine=nemo", *ON_PODS), "nemo", ("nemo-toolkit",)),
        (("task=serve_7b", "server=vllm", "cluster=local"), "serve vllm", ("mlcommons-loadgen",)),
    ],
)
def test_each_engine_has_an_image(words: tuple[str, ...], build: str, packages: tuple[str, ...]) -> None:
    assert needed.needed(planned(*words).config) == needed.Needed(build, packages)


@pytest.mark.long
def test_no_image_has_our_engine_for_amd() -> None:
    plan = planned("task=lora_7b", *MI300X)
    expected = "none of containers/build.sh has this engine for this GPU; not run on AMD Instinct MI300X"
    assert dict(plan_sheets.rows(plan))["image"] == expected


@pytest.mark.parametrize(
    ("image", "refused"),
    [
        (
            f"reg.example/team/runstop-train@sha256:{'0' * 64}",
            ["the image runstop-train does not contain transformers, accelerate, peft"],
        ),
        ("reg.example:5000/runstop-huggingface:25.11", []),
        ("reg.example/ours/runstop-train-of-us:1", []),
    ],
)
def test_an_image_for_another_engine_is_refused_by_its_name(image: str, refused: list[str]) -> None:
    plan = planned("task=lora_7b", HF, *ON_PODS, f"cluster.kubernetes.image={image}")
    problems = [finding for finding in preflight.inspect(plan) if finding.rule == "RUN-08"]
    assert [finding.what for finding in problems] == refused
    assert all(
        one.fix == "run `containers/build.sh huggingface` to build the image runstop-huggingface, and use this image"
        for one in problems
    )
    row = "runstop-huggingface (containers/build.sh huggingface), or one with transformers, accelerate, peft"
    assert dict(plan_sheets.rows(plan))["image"] == row


@pytest.mark.long
def test_an_imported_image_is_refused_by_its_description(tmp_path: Path) -> None:
    """The record that the import wrote has the description; the image itself is damaged, which is another problem."""
    image = tmp_path / f"runstop-train-sha256-{'0' * 12}.sqsh"
    image.write_bytes(b"not an image")
    marker = {"name": "runstop-train", "versions": {"torch": "2.10.0", "megatron-core": "0.16.1"}}
    record = store.Record(
        version=store.VERSION,
        file=image.name,
        source="dockerd://runstop-train",
        sha256="0" * 64,
        size_bytes=12,
        imported="2026-11-26T00:00:00Z",
        importer="copy",
        architecture="x86_64",
        os_release=None,
        marker=marker,
    )
    store.record_path(image).write_text(json.dumps(dataclasses.asdict(record)))
    words = ("cluster=dgx1", "container=pyxis", f"container.image={image}", "model.weights=random")
    texts = {}
    for engine in ("megatron", "huggingface"):
        problems = slurm_checks.file(Subject(planned("task=lora_7b", f"engine={engine}", *words), ""))
        texts[engine] = [one.what for one in problems if not isinstance(one, str) and one.rule == "RUN-08"]
    assert texts == {
        "megatron": [],
        "huggingface": ["the image runstop-train does not contain transformers, accelerate, peft"],
    }
