"""DeepSpeed's settings: a user's file, a file of conf/deepspeed or DeepSpeed's defaults, completed from the plan.

The result contains no "auto". A file that contradicts the rest of the plan is refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.engine import MOST_ZERO_STAGE, Bf16, Strategy
from bench.contract.plan import Batch
from bench.contract.schema import Config, Precision
from bench.errors import ConfigError
from bench.planning.conf_folder import CONF
from bench.planning.estimates.parameters import largest_trained

FOLDER = CONF / "deepspeed"
AUTO = "auto"
ZERO = "zero_optimization"
BUCKET = 500_000_000
"""DeepSpeed's default size of a gradient bucket, in elements. Source: DeepSpeed 0.19.8, runtime/zero/config.py."""
MOST_LIVE, SUB_GROUP = 1_000_000_000, 1_000_000_000
"""Stage 3: elements gathered at one time, and elements that the optimizer updates at one time. Source: as BUCKET."""
PREFETCHED = 50_000_000
"""Stage 3: elements prefetched together, plus at most one weight. Source: as BUCKET."""
PURE_BF16 = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
"""Keys of DeepSpeed's block bf16: master weights and their gradients in BF16, and Adam's moments, too.

Without offloaded states, DeepSpeed accepts the first key only together with the second. Source: DeepSpeed 0.19.8,
runtime/base_optimizer.py, _configure_master_weights.
"""
OURS = ("optimizer", "scheduler")
"""Blocks of a file that would override the recipe's AdamW and learning rates."""


def is_path(name: str | None) -> bool:
    """Return whether deepspeed_json is the path of a user's file, not the name of a file in conf/deepspeed."""
    return name is not None and ("/" in name or name.endswith(".json"))


def settings(config: Config, batch: Batch) -> dict[str, Any] | None:
    """Return DeepSpeed's settings; None with another strategy.

    Raises:
        ConfigError: the file cannot be read, or contradicts the config.
    """
    hf = config.huggingface
    if hf is None or hf.strategy is not Strategy.deepspeed:
        return None
    name = hf.deepspeed_json
    own = _read(name) if name else {}
    wanted = _wanted(config, batch)
    for key in OURS:
        if key in own:
            raise ConfigError(
                f"{name} has the block {key!r}, but runstop takes the optimizer and the learning rate from recipe",
                where="engine.huggingface.deepspeed_json, recipe",
                fix=f"remove {key!r} from the file, and set recipe.lr and other keys of recipe instead",
            )
    _check(own, wanted, name or "")
    merged = _merged(own, wanted)
    merged[ZERO] |= _sizes(config, merged[ZERO])
    return merged


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of ZeRO's buffers, in elements: its memory in addition to weights, gradients and optimizer states."""

    bucket: int
    num_buckets: int
    most_live: int
    prefetched: int
    sub_group: int


def sizes(config: Config) -> Sizes:
    """Return the sizes of ZeRO's buffers; raises like `settings`.

    Below stage 3, overlapped communication alternates between two buckets.
    """
    hf = config.huggingface
    assert hf is not None
    own = _read(hf.deepspeed_json).get(ZERO, {}) if hf.deepspeed_json else {}
    zero = own | _sizes(config, own)
    overlaps = bool(zero.get("overlap_comm", False)) and hf.zero_stage < MOST_ZERO_STAGE
    return Sizes(
        bucket=int(zero.get("reduce_bucket_size", BUCKET)),
        num_buckets=2 if overlaps else 1,
        most_live=int(zero.get("stage3_max_live_parameters", MOST_LIVE)),
        prefetched=int(zero.get("stage3_prefetch_bucket_size", PREFETCHED)),
        sub_group=int(zero.get("sub_group_size", SUB_GROUP)),
    )


def gathered(config: Config, num_ranks: int, num_weights: int) -> int:
    """Return how many elements stage 3 may hold gathered, including the buffers of the all-gathers.

    Prefetched weights share one buffer, which is freed only when the last of them is used; that one may be the
    largest. A single rank gathers nothing; it copies weights that are in host memory.

    Source: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (_fetch_sub_module_impl) and
    partition_parameters.py (AllGatherCoalescedHandle.wait, NoGatherHandle).
    """
    own, model, hf = sizes(config), config.model, config.huggingface
    assert hf is not None
    live = min(num_weights, own.most_live)
    if num_ranks == 1:
        return live if hf.offload_parameters else 0
    largest = largest_trained(model, None)
    return live + min(num_weights, own.prefetched + largest)


def _wanted(config: Config, batch: Batch) -> dict[str, Any]:
    """Return the settings that the config implies, by DeepSpeed's keys."""
    hf, is_bf16 = config.huggingface, config.precision is Precision.bf16
    assert hf is not None
    bf16 = {"enabled": is_bf16} | (dict.fromkeys(PURE_BF16, True) if hf.bf16_mode is Bf16.pure else {})
    zero: dict[str, Any] = {"stage": hf.zero_stage}
    if hf.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if hf.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": config.training_recipe.clip_grad,
        "bf16": bf16,
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        ZERO: zero,
    }


def _sizes(config: Config, zero: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a file leaves as "auto", computed as transformers does.

    Source: transformers 5.23, integrations/deepspeed.py, trainer_config_finalize.
    """
    hidden = config.model.hidden_size
    by_model = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    return {key: size for key, size in by_model.items() if zero.get(key) == AUTO}


def _check(own: dict[str, Any], wanted: dict[str, Any], name: str) -> None:
    """Raise ConfigError if a file contradicts the config."""
    offloads = [
        {key: value for key, value in part.get(ZERO, {}).items() if key.startswith("offload_")}
        for part in (own, wanted)
    ]
    for key in sorted({*offloads[0], *offloads[1]}):
        here, there = (_device(offload.get(key)) for offload in offloads)
        if own and here != there:
            raise _differs(name, f"{ZERO}.{key}", here, there)
    for key in PURE_BF16:
        block = own.get("bf16")
        if isinstance(block, dict) and block.get(key) and key not in wanted["bf16"]:
            raise _differs(name, f"bf16.{key}", block[key], False)
    for key, here, there in _both(own, wanted):
        if key not in ("steps_per_print", "zero_allow_untested_optimizer") and here != there:
            raise _differs(name, key, here, there)


def _device(offload: Any) -> str:
    return str(offload.get("device", "none")) if isinstance(offload, dict) else "none"


def _both(own: dict[str, Any], wanted: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that both set, with both values; "auto" in the file is not a value."""
    for key, there in wanted.items():
        here = own.get(key, AUTO)
        if key.startswith("offload_") or here == AUTO:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            yield from _both(here, there, f"{place}{key}.")
        else:
            yield f"{place}{key}", here, there


KEYS = {
    f"{ZERO}.stage": "engine.huggingface.zero_stage",
    f"{ZERO}.offload_optimizer": "engine.huggingface.offload_optimizer",
    f"{ZERO}.offload_param": "engine.huggingface.offload_parameters",
    "train_batch_size": "recipe.global_batch_size",
    "train_micro_batch_size_per_gpu": "recipe.micro_batch_size",
    "gradient_accumulation_steps": "recipe.global_batch_size, recipe.micro_batch_size",
    "gradient_clipping": "recipe.clip_grad",
    "bf16.enabled": "precision",
    **{f"bf16.{key}": "engine.huggingface.bf16" for key in PURE_BF16},
    "fp16.enabled": "precision",
}
"""The config key for each of DeepSpeed's keys."""


def _differs(name: str, key: str, here: Any, there: Any) -> ConfigError:
    return ConfigError(
        f"{name} sets {key} to {here}, but the config needs {there}",
        where=f"engine.huggingface.deepspeed_json, {KEYS.get(key, key)}",
        fix=f"write {there} or {AUTO!r} in the file, or change the config",
    )


def _merged(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings, with `other` for keys that are missing or "auto"."""
    merged = dict(own)
    for key, value in other.items():
        mine = merged.get(key, AUTO)
        merged[key] = (
            _merged(mine, value)
            if isinstance(mine, dict) and isinstance(value, dict)
            else (value if mine == AUTO else mine)
        )
    return merged


def _read(name: str) -> dict[str, Any]:
    path = Path(name) if is_path(name) else FOLDER / f"{name}.json"
    where = f"engine.huggingface.deepspeed_json={name}"
    known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"the file {name} cannot be read: {error.strerror}",
            where=where,
            fix=f"give the path of a file, or one of the names {known}",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the file {name} is not JSON: {error}", where=where, fix="write a single JSON object into the file"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get(ZERO, {}), dict):
        raise ConfigError(
            f"the file {name} is not a JSON object of DeepSpeed settings",
            where=where,
            fix=f"begin with a copy of one of the files in conf/deepspeed: {known}",
        )
    _refuse_auto(content, where)
    return content


FILLED_IN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16.enabled", "fp16.enabled", f"{ZERO}.stage", f"{ZERO}.reduce_bucket_size"),
    *(f"{ZERO}.stage3_prefetch_bucket_size", f"{ZERO}.stage3_param_persistence_threshold"),
)
"""The keys that may be "auto"."""


def _refuse_auto(content: dict[str, Any], where: str, place: str = "") -> None:
    """Refuse "auto" for a key that the plan cannot fill in."""
    for key, value in content.items():
        if isinstance(value, dict):
            _refuse_auto(value, where, f"{place}{key}.")
        elif value == AUTO and f"{place}{key}" not in FILLED_IN:
            what, fix = (
                f"{place}{key} is {AUTO!r}, but runstop has no value for this key",
                "write a value into the file",
            )
            raise ConfigError(what, where=where, fix=fix)
