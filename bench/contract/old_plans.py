"""Convert plans and configs of earlier versions to this version, so that old run folders can still be read."""

from typing import Any

MOVED = {"jobs.prepare": "jobs.tasks.prepare", "jobs.train": "jobs.tasks.train"}
"""Modules that plans of version 2 start, and their current names."""
CONFIG_KEYS = {
    "task.serving.server.bunches_chunks": "task.serving.server.batches_tokens",
    "task.serving.server.healthy_within_s": "task.serving.server.startup_timeout_s",
    "task.kernels.gemm.of_model": "task.kernels.gemm.from_model",
    "task.kernels.attention.math_up_to": "task.kernels.attention.math_max_seq_length",
}
"""Config keys of version 4 that were renamed; `bench.planning.compose` accepts the old ones in overrides."""
DESCRIBED_KEY = ("model", "described", "num_untold_layers"), "num_uncounted_layers"
"""A config key of plans up to version 5, and its current name."""
PLAN_KEYS = {"apart": "local_sgd", "asked": "requests"}
"""Keys of plans of version 4."""
PREDICTION_KEYS = {
    "num_merges": "num_averagings",
    "even_with_one_group": "break_even_one_group",
    "even_with_synchronous": "break_even_synchronous",
}
"""Keys of `local_sgd` in plans of version 4."""


def upgraded(raw: Any, *, to: int) -> Any:
    """Convert a plan's JSON to this version.

    Version 2 had one kind of task and one engine; commands were called steps, and backends schedulers. Its batch script
    started the node checks itself, so they are not among its commands. Versions 3 and 4 had other names for some keys.

    Raises:
        ValueError: the version cannot be read.
    """
    if raw is None:
        return None
    if raw["version"] == to:
        path, name = DESCRIBED_KEY
        return _with_new_key(_with_new_key(raw, ["config", *path], name), ["base", "config", *path], name)
    if raw["version"] in (3, 4):
        changed = {"config": upgraded_config(raw.get("config")), "base": upgraded(raw.get("base"), to=to)}
        return _renamed(raw) | {"version": to} | {key: value for key, value in changed.items() if key in raw}
    if raw["version"] != 2:
        raise ValueError(f"the plan has version {raw['version']}, which this version of runstop cannot read")
    new = raw | {"version": to, "base": upgraded(raw["base"], to=to)}
    new["commands"] = [
        step | {"argv": [MOVED.get(argument, argument) for argument in step["argv"]]} for step in new.pop("steps")
    ]
    new["max_steps"] = raw["config"]["recipe"]["max_steps"]
    new["config"] = _config(raw["config"], has_checkpoint=raw["base_dir"] is not None)
    return new


def _renamed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of version 3 or 4 with the current names of its own keys."""
    new = {PLAN_KEYS.get(key, key): value for key, value in raw.items()}
    if isinstance(new.get("local_sgd"), dict):
        new["local_sgd"] = {PREDICTION_KEYS.get(key, key): value for key, value in new["local_sgd"].items()}
    if isinstance(new.get("loads"), list):
        new["loads"] = [
            {"batched_tokens" if key == "bunched" else key: value for key, value in load.items()}
            for load in new["loads"]
        ]
    return new


def _config(old: dict[str, Any], *, has_checkpoint: bool) -> Any:
    cluster, recipe, task = dict(old["cluster"]), dict(old["recipe"]), dict(old["task"])
    cluster["backend"] = cluster.pop("scheduler")
    is_random = old["model"]["weights"] == "random"
    lora, base = task.pop("lora"), task.pop("base")
    start = "random" if is_random or not has_checkpoint else "task" if base else "checkpoint"
    training = {
        "trains": "all" if lora is None else "lora",
        "starts_from": start,
        "base": base if start == "task" else None,
        "lora": lora,
        "target_eval_loss": task.pop("target_eval_loss"),
        "max_steps": recipe.pop("max_steps"),
    }
    data = old["data"] | ({"source": "random"} if is_random else {})
    changed = {"cluster": cluster, "recipe": recipe, "task": task | {"kind": "train", "training": training}}
    return upgraded_config(old | changed | {"data": data, "engine": {"name": "megatron"}})


def upgraded_config(config: Any) -> Any:
    """Convert a config of version 3 or 4; a current config is returned unchanged.

    In version 3, launch.profile was a boolean, recipe.local_sgd could be null, and tasks that do not train had rows and
    a recipe.
    """
    if not isinstance(config, dict):
        return config
    config = _with_new_keys(config)
    new = dict(config)
    launch, recipe, task = config.get("launch"), config.get("recipe"), config.get("task")
    if isinstance(launch, dict) and isinstance(launch.get("profile"), bool):
        new["launch"] = launch | {"profile": "kernels" if launch["profile"] else "none"}
    if isinstance(recipe, dict) and recipe.get("local_sgd", {}) is None:
        new["recipe"] = {key: value for key, value in recipe.items() if key != "local_sgd"}
    if isinstance(task, dict) and task.get("kind") != "train" and recipe and config.get("data"):
        del new["recipe"], new["data"]
        gemm = (task.get("kernels") or {}).get("gemm")
        if gemm:
            tokens = (recipe["micro_batch_size"] or 1) * config["data"]["seq_length"]
            new["task"] = task | {"kernels": task["kernels"] | {"gemm": gemm | {"model_tokens": tokens}}}
    return new


def _with_new_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of CONFIG_KEYS and DESCRIBED_KEY renamed; other keys keep their order."""
    for old, new in CONFIG_KEYS.items():
        config = _with_new_key(config, old.split("."), new.rpartition(".")[2])
    path, name = DESCRIBED_KEY
    return _with_new_key(config, [*path], name)


def _with_new_key(block: dict[str, Any], path: list[str], new: str) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {new if key == head else key: value for key, value in block.items()}
    inner = block.get(head)
    return block | {head: _with_new_key(inner, rest, new)} if isinstance(inner, dict) else block
