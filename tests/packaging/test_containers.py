"""The parts of the images: pins in one file, scripts that run, and a marker file with the versions."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from helpers.ranks import ROOT

CONTAINERS = ROOT / "containers"


def pins() -> dict[str, str]:
    lines = (CONTAINERS / "pins.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_pins_are_complete_and_images_use_only_pins() -> None:
    pinned = pins()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", pinned["BASE_DIGEST"])
    engine = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["engine"]
    assert f"megatron-core=={pinned['MEGATRON_CORE']}" in engine
    named = set()
    for path in CONTAINERS.glob("*.Dockerfile"):
        text = path.read_text()
        named |= set(re.findall(r"\$\{?([A-Z_]+)", text)) - {"BASE", "COMMIT"}
        assert not re.search(r"==\d|:\d\d\.\d\d|sha256:", text), "a version is outside of pins.env"
        assert re.findall(r"^COPY (\S+)", text, re.M) == ["pyproject.toml", "bench", "conf", "jobs", "containers"]
    bases = {f"{base}_{part}" for base in ("BASE", "ROCM") for part in ("IMAGE", "TAG", "DIGEST")}
    assert named - {"ROCM_PATH"} <= pinned.keys() and pinned.keys() - named == bases


def test_the_pins_of_hugging_face_fit_the_extra_of_the_project() -> None:
    """The images install the packages of the extra `huggingface` one by one: their torch is that of the base."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = {each.name: each for each in map(Requirement, extras["huggingface"])}
    names = ("transformers", "accelerate", "peft", "deepspeed", "bitsandbytes")
    assert {name for name in names if not requirements[name].specifier.contains(pins()[name.upper()])} == set()
    for kind in ("huggingface", "rocm"):
        text = (CONTAINERS / f"{kind}.Dockerfile").read_text()
        assert [name for name in names if f'"{name}==${name.upper()}"' not in text] == []
    base = {"torch", "safetensors", "numpy", "psutil", "nvidia-ml-py"}
    assert requirements.keys() - {*names} == base, "add the new package to both images"


@pytest.mark.parametrize("kind", ["huggingface", "rocm", "nemo"])
def test_an_image_is_built_on_the_base_of_its_gpus(kind: str, tmp_path: Path) -> None:
    tree, engine = tmp_path / "tree", tmp_path / "engine"
    shutil.copytree(CONTAINERS, tree / "containers", ignore=shutil.ignore_patterns("__pycache__"))
    engine.write_text('#!/bin/bash\necho "$@"\n')
    engine.chmod(0o755)
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    env = os.environ | {"ENGINE": str(engine)}
    done = subprocess.run([tree / "containers/build.sh", kind], env=env, check=True, capture_output=True, text=True)
    pinned, base = pins(), "ROCM" if kind == "rocm" else "BASE"
    assert done.stdout.startswith(f"runstop-{kind}:{pinned[f'{base}_TAG']}-")
    assert f"/containers/{kind}.Dockerfile --tag " in done.stderr
    assert f"--build-arg BASE={pinned[f'{base}_IMAGE']}@{pinned[f'{base}_DIGEST']} " in done.stderr


@pytest.mark.parametrize("script", sorted(CONTAINERS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_pass_their_checks(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", script], check=True, cwd=ROOT)


@pytest.mark.long
def test_the_build_context_has_only_committed_files(tmp_path: Path) -> None:
    """The engine of this build lists what it is given."""
    tree, engine = tmp_path / "tree", tmp_path / "engine"
    shutil.copytree(CONTAINERS, tree / "containers", ignore=shutil.ignore_patterns("__pycache__"))
    engine.write_text('#!/bin/bash\necho "$@"; cd "${@: -1}"; find . -type f\n')
    engine.chmod(0o755)
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    (tree / ".env").write_text("KEY=secret")
    (tree / "containers/train.Dockerfile").write_text("FROM scratch")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    build = [tree / "containers/build.sh", "train", "--platform=linux/arm64"]
    done = subprocess.run(build, env=os.environ | {"ENGINE": str(engine)}, check=True, capture_output=True, text=True)
    pinned = pins()
    assert done.stdout == f"runstop-train:{pinned['BASE_TAG']}-{commit[:12]}\n"
    assert "changes that are not committed are not in the image" in done.stderr
    assert f"--build-arg BASE={pinned['BASE_IMAGE']}@{pinned['BASE_DIGEST']} --build-arg COMMIT={commit}" in done.stderr
    assert "--platform=linux/arm64" in done.stderr
    seen = [line for line in done.stderr.splitlines() if line.startswith("./")]
    assert sorted(seen) == sorted(f"./containers/{path.name}" for path in CONTAINERS.iterdir() if path.is_file())
    assert subprocess.run([build[0], "all"], capture_output=True).returncode == 2


@pytest.mark.long
def test_a_server_image_is_based_on_the_one_in_its_config(tmp_path: Path) -> None:
    tree, engine = tmp_path / "tree", tmp_path / "engine"
    for folder in ("containers", "conf/server"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    engine.write_text('#!/bin/bash\necho "$@"\n')
    engine.chmod(0o755)
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    script, env = tree / "containers/build.sh", os.environ | {"ENGINE": str(engine)}
    for config in (ROOT / "conf/server").glob("*.yaml"):
        if image := yaml.safe_load(config.read_text()).get("image"):
            words = [script, "serve", config.stem, "--platform=linux/arm64"]
            done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
            assert done.stdout.startswith(f"runstop-serve:{config.stem}-"), "one tag for each server"
            assert "/serve.Dockerfile --tag " in done.stderr
            assert f"--build-arg BASE={image} " in done.stderr and "--platform=linux/arm64" in done.stderr
    named_none = "conf/server/transformers.yaml has no image"
    for words, why in ((["none"], "usage: "), ([], "usage: "), (["transformers"], named_none)):
        refused = subprocess.run([script, "serve", *words], env=env, capture_output=True, text=True)
        assert refused.returncode == 2 and why in refused.stderr and not refused.stdout


def test_the_marker_has_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("marker", CONTAINERS / "marker.py")
    assert spec is not None and spec.loader is not None
    marker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(marker)
    monkeypatch.setattr(marker, "PATH", tmp_path / "marker.json")
    pinned = pins()
    base = f"{pinned['BASE_IMAGE']}@{pinned['BASE_DIGEST']}"
    for given, shown in ((base, f"{pinned['BASE_IMAGE']}:{pinned['BASE_TAG']}"), ("acme/base@sha256:1", "acme/base")):
        monkeypatch.setattr(
            sys, "argv", ["marker", "runstop-train", "--base", given, "--commit", "c0ffee", "megatron-core"]
        )
        marker.main()
        content = json.loads((tmp_path / "marker.json").read_text())
        assert (content["name"], content["base"], content["commit"]) == ("runstop-train", shown, "c0ffee")
        assert (
            content["digest"] == given.partition("@")[2]
            and content["versions"]["megatron-core"] == pinned["MEGATRON_CORE"]
        )
    monkeypatch.setattr(
        sys, "argv", ["marker", "runstop-train", "--base", base, "--commit", "c0ffee", "no-such-package"]
    )
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        marker.main()
