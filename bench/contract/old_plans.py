"""Plans of earlier versions, read as this version writes them: old run folders stay readable."""

from typing import Any

MOVED = {"jobs.prepare": "jobs.tasks.prepare", "jobs.train": "jobs.tasks.train"}
"""Modules that a plan of version 2 starts, and what they are called now."""


def upgraded(raw: Any, *, to: int) -> Any:
    """Return a plan's JSON as this version writes it.

    Version 2 called commands steps and backends schedulers, and knew one kind of task and one engine. It did not hold
    what looks at the nodes before the first trial, which its batch script started by itself: that stays missing.

    Raises:
        ValueError: a version that cannot be read.
    """
    if raw is None:
        return None
    if raw["version"] == to:
        return raw
    if raw["version"] == 3:
        changed = {"config": upgraded_config(raw.get("config")), "base": upgraded(raw.get("base"), to=to)}
        return raw | {"version": to} | {key: value for key, value in changed.items() if key in raw}
    if raw["version"] != 2:
        raise ValueError(f"version {raw['version']}, and this is version {to}")
    new = raw | {"version": to, "base": upgraded(raw["base"], to=to)}
    new["commands"] = [step | {"argv": [MOVED.get(word, word) for word in step["argv"]]} for step in new.pop("steps")]
    new["max_steps"] = raw["config"]["recipe"]["max_steps"]
    new["config"] = _config(raw["config"], has_checkpoint=raw["base_dir"] is not None)
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
    """Return a config of version 3 as this version writes it; another one is returned as it is.

    launch.profile was a switch while there was one kind of profile, recipe.local_sgd was null where there was none, and
    tasks that train nothing had rows and a recipe.
    """
    if not isinstance(config, dict):
        return config
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
