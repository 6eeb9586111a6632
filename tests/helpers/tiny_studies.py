"""Shipped studies in small: the same arms with a tiny model and few steps, for two CPU cores.

A tiny study is a file for --config-dir. Of the models of the shipped study it keeps one, because all arms have the same
tiny model; and of the works of ironbyte one for each task. It has no pairs, no tables and no published figures, and any
device measures it.
"""

from pathlib import Path
from typing import Any

import yaml

from helpers.paths import ROOT

LABELS: dict[str, dict[str, tuple[str, ...]]] = {
    "dissect_pretraining": {"model": ("7B",)},
    "dissect_finetuning": {"model": ("7B",)},
    "dissect_modules": {"model": ("7B",)},
    "ironbyte": {
        "work": (
            "70B pre-training, 100 steps",
            "70B fine-tuning, 100 steps",
            "7B pre-training, 2000 steps",
            "7B fine-tuning, 1 epoch",
        ),
    },
}
"""The labels of each study that are kept."""
SMALLER = {
    "engine.huggingface.num_gpus=8": "engine.huggingface.num_gpus=1",
    "parallel.tp=8": "parallel.tp=2",
    **{f"parallel.groups={groups}": "parallel.groups=1" for groups in (4, 5, 8, 10)},
    "parallel.share_gpu=true": "parallel.share_gpu=false",
    "recipe.micro_batch_size=32": "recipe.micro_batch_size=2",
    "recipe.global_batch_size=256": "recipe.global_batch_size=4",
    "cluster=net_80_gbit": "cluster=local",
    "cluster.num_nodes=2": "cluster.num_nodes=1",
}
"""Overrides for the document's GPUs, and those for two ranks on the CPUs of one machine."""
COMMON = (
    *("model=tiny", "model.weights=random", "precision=bf16", "launch.health=false", "walltime=10"),
    "model.ffn_hidden_size=256",  # so that tp=2 divides it into parts of whole 4-bit blocks
)
TRAINING = (
    *("data=rows_350", "data.train_rows=64", "data.eval_rows=2", "recipe.global_batch_size=2"),
    *("recipe.micro_batch_size=1", "recipe.eval_every_samples=12", "recipe.lr_warmup_steps=1"),
)
STEPS = {"skip_steps": 2, "steps": 4}


def write(name: str, folder: Path) -> str:
    """Write the tiny study of a shipped one into folder/study; return its name."""
    study = yaml.safe_load((ROOT / f"conf/study/{name}.yaml").read_text())
    kept = LABELS[name]
    for label, values in kept.items():
        study["axes"][label] = {value: study["axes"][label][value] for value in values}
    study["arms"] = {arm: fields for arm, fields in study.get("arms", {}).items() if _is_kept(fields["labels"], kept)}
    study["cases"] = [case for case in map(_smaller_case, study.get("cases", [])) if _matches(case["match"], study)]
    for part in ("device", "pairs", "tables", "published", "coefficients", "window", "findings"):
        study.pop(part, None)
    is_training = name != "ironbyte"  # which also generates: its arms have the settings of their kind
    study["overrides"] = [*study.get("overrides", []), *COMMON, *(TRAINING if is_training else ())]
    if is_training:
        study["window"] = STEPS
    else:
        _make_works_small(study)
    study |= {"runs": 1, "title": f"{study['title']}, in small"}
    (folder / "study").mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(study, sort_keys=False, width=1000)
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    (folder / f"study/{name}_tiny.yaml").write_text(text)
    return f"{name}_tiny"


def _is_kept(labels: dict[str, Any], kept: dict[str, tuple[str, ...]]) -> bool:
    return all(str(labels[label]) in values for label, values in kept.items() if label in labels)


def _smaller_case(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key != "calculated"}


def _matches(match: dict[str, Any], study: dict[str, Any]) -> bool:
    """Remove values that no arm has from a match; return whether it still matches some arm."""
    for label, values in match.items():
        known = {str(value) for value in study["axes"].get(label, {})}
        known |= {str(arm["labels"].get(label)) for arm in study["arms"].values()}
        match[label] = [value for value in ([values] if isinstance(values, str) else values) if str(value) in known]
    return all(match.values()) and set(match) <= {*study["axes"], "arm"}


def _make_works_small(study: dict[str, Any]) -> None:
    for overrides in study["axes"]["work"].values():
        short = ["task.training.epochs=null", "task.training.max_steps=6"]
        overrides[:] = [overrides[0], *TRAINING, *short]
    for case in study["cases"]:
        if any("local_sgd" in override for override in case.get("overrides", ())):
            case["overrides"] += ["recipe.local_sgd.every_steps=3", "recipe.local_sgd.overlap_steps=1", *TRAINING]
