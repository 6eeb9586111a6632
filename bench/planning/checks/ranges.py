"""Checks of numeric ranges in the config."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from bench.contract.schema import Config, DataSource
from bench.errors import ConfigError

EXPERTS = ("num_experts", "experts_per_token", "ffn_hidden_size")
NETWORK = ("nvlink_gbs", "nvlink_gpus", "nics_per_node", "nic_gbs", "oversubscription")
FAILURES = ("node_mtbf_hours", "restart_s", "checkpoint_s")
MAX_TRIALS, MAX_STEPS = 1000, 10_000_000
"""Larger numbers are typing errors: a score needs 10 trials."""


def check(config: Config) -> None:
    """Raise ConfigError for a number out of range."""
    _check_signs(config)
    _check_upper_limits(config)
    _check_rates(config)


def _check_signs(config: Config) -> None:
    """Refuse counts and sizes that are not positive, and optional amounts that are negative."""
    for key, number in _positive(config).items():
        if number is not None and not 0 < number < math.inf:
            raise ConfigError(
                f"{key} is {number}, but must be a positive number", where=key, fix=f"set {key} to a positive number"
            )
    for key, amount in _not_negative(config).items():
        if amount is not None and not 0 <= amount < math.inf:
            raise ConfigError(
                f"{key} is {amount}, but must be a finite number of 0 or more", where=key, fix=f"set {key} to 0 or more"
            )
    for key, number in _floats(config, ""):
        if not math.isfinite(number):  # JSON, the format of a plan, has no such number
            raise ConfigError(
                f"{key} is {number}, but must be a finite number", where=key, fix=f"set {key} to a finite number"
            )


def _check_upper_limits(config: Config) -> None:
    r = config.recipe
    for key, beta in ({"recipe.adam_beta1": r.adam_beta1, "recipe.adam_beta2": r.adam_beta2} if r else {}).items():
        if not 0 <= beta < 1:
            raise ConfigError(
                f"{key} is {beta}, but must be 0 or more, and below 1",
                where=key,
                fix=f"set {key} to a number from 0 to below 1, such as 0.9",
            )
    largest = {
        "trials": (config.trials, MAX_TRIALS),
        "task.training.max_steps": (config.training.max_steps if config.task.training else None, MAX_STEPS),
    }
    for key, (count, limit) in largest.items():
        if count is not None and count > limit:
            raise ConfigError(
                f"{key} is {count}, but must be {limit} or less", where=key, fix=f"set {key} to {limit} or less"
            )
    stall = config.launch.stall
    if stall is not None and stall.factor <= 1:
        raise ConfigError(
            f"launch.stall.factor is {stall.factor:g}, but must be above 1: with a lower factor, the watchdog ends "
            "trials that do not stall",
            where="launch.stall.factor",
            fix="set launch.stall.factor above 1, or set launch.stall=null",
        )
    port = config.cluster.master_port
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(
            f"cluster.master_port is {port}, which is not a valid port",
            where="cluster.master_port",
            fix="set cluster.master_port to a port from 1 to 65535, or to null",
        )


def _positive(config: Config) -> dict[str, float | None]:
    """Return the numbers that must be positive, by key; None is allowed where the schema allows it."""
    model = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *("vocab_size", "max_seq_length", "rope_scaling_factor"),
    )
    recipe = (
        *("global_batch_size", "micro_batch_size", "eval_every_samples", "log_every_steps"),
        *("lr", "clip_grad", "adam_eps"),
    )
    gpu = ("memory_gib", "peak_bf16_tflops", "peak_fp8_tflops", "memory_gbs", "link_gbs", "pcie_gbs")
    ends = ("max_steps", "epochs", "target_eval_loss", "checkpoint_every_steps")
    rows = config.data if config.data and config.data.source is not DataSource.program else None  # 0: unknown
    return {
        **(_values("model", config.model, model) if config.model.is_known else {}),
        **(_values("model.experts", config.model.experts, EXPERTS) if config.model.experts else {}),
        **_values("parallel", config.parallel, ("tp", "pp", "cp", "vpp", "ep")),
        **_values("cluster", config.cluster, ("num_nodes", "ranks_per_node", "price_per_gpu_hour", "power_per_gpu_w")),
        **(_values("cluster.network", config.cluster.network, NETWORK) if config.cluster.network else {}),
        **(_values("cluster.failures", config.cluster.failures, FAILURES) if config.cluster.failures else {}),
        **(_values("recipe", config.recipe, recipe) if config.recipe else {}),
        **(_values("task.training", config.training, ends) if config.task.training else {}),
        **(_values("data", rows, ("seq_length", "train_rows", "eval_rows", "sample")) if rows else {}),
        **(_values("launch.stall", config.launch.stall, ("factor", "floor_s")) if config.launch.stall else {}),
        **(_values("cluster.gpu", config.cluster.gpu, gpu) if config.cluster.gpu else {}),
        "trials": config.trials,
        "launch.attempts": config.launch.attempts,
    }


def _not_negative(config: Config) -> dict[str, float | None]:
    """Return the numbers that must not be negative, by key."""
    recipe = ("lr_warmup_steps", "warmup_iterations", "eval_skip", "weight_decay")
    vboost = config.cluster.slurm.vboost if config.cluster.slurm else None
    of_recipe = _values("recipe", config.recipe, recipe) if config.recipe else {}
    of_data = _values("data", config.data, ("seq_length", "train_rows", "eval_rows")) if config.data else {}
    of_experts = _values("model.experts", config.model.experts, ("aux_loss_coef",)) if config.model.experts else {}
    network = config.cluster.network
    of_network = _values("cluster.network", network, ("nvlink_latency_us", "nic_latency_us")) if network else {}
    of_config = {"seed_base": config.seed_base, "cluster.slurm.vboost": vboost}
    return {**of_recipe, **of_data, **of_experts, **of_network, **of_config}


def _floats(value: object, key: str) -> Iterator[tuple[str, float]]:
    """Yield every float in a config, with its key."""
    if isinstance(value, float):
        yield key, value
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from _floats(getattr(value, item.name), f"{key}.{item.name}".removeprefix("."))
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _floats(item, f"{key}.{name}")


def _values(group: str, node: object, names: Iterable[str]) -> dict[str, float | None]:
    return {f"{group}.{name}": getattr(node, name) for name in names}


def _check_rates(config: Config) -> None:
    """Refuse measured rates that are not positive, and tables whose sizes are not ascending."""
    rates = config.cluster.gpu.rates if config.cluster.gpu else None
    if rates is None:
        return
    tables = {
        "layer_tflop, bf16_tflops and fp8_tflops": (rates.layer_tflop, rates.bf16_tflops, rates.fp8_tflops),
        "busbw_mib and busbw_gbs": (rates.busbw_mib, rates.busbw_gbs),
    }
    for names, (sizes, *columns) in tables.items():
        is_rising = all(low < high for low, high in zip(sizes, sizes[1:], strict=False))
        sizes_key, *_ = names.replace(",", "").split()
        if any(len(column) != len(sizes) for column in columns):
            keys = names.replace(",", "").replace(" and", "").split()
            lengths = [f"{key} has {len(column)}" for key, column in zip(keys, (sizes, *columns), strict=True)]
            raise ConfigError(
                f"the lists {names} must have the same number of entries, but {', '.join(lengths)}",
                where="cluster.gpu.rates",
                fix=f"list one rate for each number in {sizes_key}",
            )
        if not is_rising:
            raise ConfigError(
                f"{sizes_key} is {sizes}, but the numbers must be in ascending order, without duplicates",
                where="cluster.gpu.rates",
                fix=f"list the numbers of {sizes_key} in ascending order, and the rates in the same order",
            )
    if not rates.layer_tflop:
        raise ConfigError(
            "cluster.gpu.rates.layer_tflop is empty, so there are no rates of GEMMs",
            where="cluster.gpu.rates",
            fix="measure the rates with `runstop calibrate`, or set cluster.gpu.rates=null",
        )
    single = (rate for rate in dataclasses.asdict(rates).values() if isinstance(rate, int | float))
    all_rates = [*single, *itertools.chain(*itertools.chain(*tables.values()))]
    if not all(0 < number < math.inf for number in all_rates):
        raise ConfigError(
            "a number in cluster.gpu.rates is zero, negative or not finite, but all numbers must be positive",
            where="cluster.gpu.rates",
            fix="set all rates to measured values, or set cluster.gpu.rates=null",
        )
