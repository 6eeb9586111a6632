"""Checks of a config that apply to tasks of every kind."""

import re
from collections.abc import Iterable

from bench.contract import families
from bench.contract.cluster import GpuVendor, require_even
from bench.contract.described_model import FAMILY
from bench.contract.model import Position
from bench.contract.schema import BackendName, Config, Device, EngineName, Precision
from bench.contract.task import Kind
from bench.errors import ConfigError
from bench.mlperf.system_fields import FIELDS
from bench.planning import program, replicas
from bench.planning.checks import experts, generation, local_sgd, ranges, texts
from bench.planning.commands import walltime_min

MAX_SPARES = 64
_CURRENCY = re.compile("[A-Z]{3}")


def check(config: Config) -> None:
    """Raise ConfigError if the config is invalid in every layout, for tasks of every kind."""
    texts.check(config)
    _check_kind(config)
    ranges.check(config)
    _check_heads(config)
    _check_family(config)
    _check_positions(config)
    _check_cluster(config)
    _check_spares(config)
    _check_walltime(config)
    generation.check_sharing(config)
    local_sgd.check(config)
    experts.check(config)
    program.check(config)


def _check_kind(config: Config) -> None:
    """Refuse a task without the block of its kind, or with the block of another kind, and rows without training."""
    task = config.task
    for kind in Kind:
        is_given = getattr(task, kind.value) is not None
        if is_given and kind is not task.kind:
            raise ConfigError(
                f"task {task.name} is of kind {task.kind.name}, but the block task.{kind.value} is set",
                where=f"task.kind, task.{kind.value}",
                fix=f"set task.{kind.value}=null, or task.kind={kind.name}",
            )
        if not is_given and kind is task.kind:
            raise ConfigError(
                f"task {task.name} is of kind {task.kind.name}, but the block task.{kind.value} is missing",
                where=f"task.kind, task.{kind.value}",
                fix=f"add the block task.{kind.value}",
            )
    for key, block in (("data", config.data), ("recipe", config.recipe)):
        if block is None and task.kind is Kind.train:
            raise ConfigError(
                f"task {task.name} trains, but the block {key} is missing",
                where=key,
                fix=f"remove ~{key} or {key}=null from the command line, or add the block {key} to the task's file",
            )
        if block is not None and task.kind is not Kind.train:
            raise ConfigError(
                f"task {task.name} does not train, but the block {key} is set",
                where=key,
                fix=f"set {key}=null in the task's file",
            )


def _check_heads(config: Config) -> None:
    m = config.model
    if not m.is_known:
        return
    if m.num_attention_heads % m.num_query_groups:
        raise ConfigError(
            f"model.num_attention_heads is {m.num_attention_heads}, but must be a multiple of model.num_query_groups, "
            f"which is {m.num_query_groups}",
            where="model",
            fix=f"set model.num_query_groups to a divisor of {m.num_attention_heads}",
        )
    if m.head_dim is None and m.hidden_size % m.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size is {m.hidden_size}, but must be a multiple of model.num_attention_heads, which is "
            f"{m.num_attention_heads}",
            where="model",
            fix=f"set model.num_attention_heads to a divisor of {m.hidden_size}, or set model.head_dim",
        )
    if m.position is Position.rope and m.head_size % 2:
        raise ConfigError(
            f"the size of an attention head is {m.head_size}, but RoPE needs an even size",
            where="model.head_dim",
            fix="set model.head_dim to an even number",
        )


def _check_family(config: Config) -> None:
    """Refuse a model without the layers of its family, and an engine that does not have them."""
    if config.model.family is None:
        return
    if config.model.family == FAMILY:
        _check_described(config)
        return
    family, engine = families.of_model(config.model), config.engine.name
    if engine not in family.engines and config.task.kind in (Kind.train, Kind.generate):
        reason = f": {family.why_not_others}" if family.why_not_others else ""
        raise ConfigError(
            f"engine={engine.name} has no layers for {config.model.name} (family {family.name}){reason}",
            where="engine, model.family",
            fix=f"choose another model, or set engine={' or '.join(supported.name for supported in family.engines)}",
        )


def _check_described(config: Config) -> None:
    """Refuse a model that transformers describes with another engine, and one that was not read from a folder."""
    described = config.model.described
    if described is None:
        raise ConfigError(
            f"model.family is {FAMILY}, but only model=hf may set this family",
            where="model.family",
            fix="set model=hf, engine=huggingface and MODEL to a Hugging Face folder",
        )
    if config.engine.name is not EngineName.huggingface:
        raise ConfigError(
            f"engine={config.engine.name.name} has no layers for the architecture {described.architecture}",
            where="engine, model",
            fix="set engine=huggingface",
        )


def _check_positions(config: Config) -> None:
    s, m = config.data.seq_length if config.data else 0, config.model
    if m.is_known and s > m.max_seq_length and m.position is Position.learned:
        raise ConfigError(
            f"data.seq_length is {s} tokens, but {m.name} has position embeddings for only {m.max_seq_length} tokens",
            where="data.seq_length, model.max_seq_length",
            fix=f"set data.seq_length to {m.max_seq_length} or less",
        )


def _check_cluster(config: Config) -> None:
    c = config.cluster
    if c.backend is BackendName.ssh and c.hosts is not None:
        require_even(c.hosts, num_nodes=c.num_nodes, ranks_per_node=replicas.ranks_per_node(config))
    elif c.hosts:
        raise ConfigError(
            f"cluster.hosts needs backend ssh, but the backend is {c.backend.name}",
            where="cluster.hosts",
            fix="set cluster=hosts, or remove cluster.hosts",
        )
    if not c.backend.is_elsewhere and c.num_nodes != 1:
        raise ConfigError(
            f"backend {c.backend.name} runs only on this machine, but cluster.num_nodes is {c.num_nodes}",
            where="cluster.num_nodes",
            fix="set cluster.num_nodes=1, or choose another cluster",
        )
    if c.price_per_gpu_hour is not None and c.device is Device.cpu:
        raise ConfigError(
            f"cluster.price_per_gpu_hour is {c.price_per_gpu_hour:g}, but this cluster has no GPUs",
            where="cluster.price_per_gpu_hour",
            fix="set cluster.price_per_gpu_hour=null, or cluster.device=cuda",
        )
    if unknown := sorted(c.system_description.keys() - set(FIELDS)):
        raise ConfigError(
            f"{unknown[0]!r:.80} is not a field of MLPerf's system description",
            where="cluster.system_description",
            fix=f"use only the fields {', '.join(FIELDS)}",
        )
    if not _CURRENCY.fullmatch(c.currency):
        raise ConfigError(
            f"cluster.currency is {c.currency!r}, which is not a currency code",
            where="cluster.currency",
            fix="set cluster.currency to three capital letters, such as USD or EUR (ISO 4217)",
        )
    if c.device is Device.cuda and c.gpu is None and c.backend.is_elsewhere:
        raise ConfigError(
            "cluster.device is cuda, but cluster.gpu, the GPU of this cluster, is not set",
            where="cluster.gpu",
            fix="set cluster.gpu: the name, memory and peak rates of the GPU",
        )


def _check_spares(config: Config) -> None:
    """Refuse spare nodes, and the replacement of slow nodes, where nothing would use them."""
    c, launch = config.cluster, config.launch
    if not 0 <= c.spare_nodes <= MAX_SPARES:
        raise ConfigError(
            f"cluster.spare_nodes is {c.spare_nodes}, but must be from 0 to {MAX_SPARES}",
            where="cluster.spare_nodes",
            fix=f"set cluster.spare_nodes to the number of slow nodes to replace, from 0 to {MAX_SPARES}",
        )
    if c.spare_nodes and not launch.replace_slow:
        raise ConfigError(
            f"cluster.spare_nodes is {c.spare_nodes}, but launch.replace_slow is false, so no spare node can be used",
            where="cluster.spare_nodes, launch.replace_slow",
            fix="set launch.replace_slow=true, or cluster.spare_nodes=0"
            if c.backend in (BackendName.slurm, BackendName.ray)
            else "set cluster.spare_nodes=0",
        )
    if not launch.replace_slow:
        return
    if c.backend not in (BackendName.slurm, BackendName.ray):
        raise ConfigError(
            f"launch.replace_slow works only on Slurm and Ray, but the backend is {c.backend.name}",
            where="launch.replace_slow",
            fix="set launch.replace_slow=false; to leave out the slow nodes of earlier runs, set cluster.avoid=auto",
        )
    if c.backend is BackendName.ray:
        if not c.spare_nodes:
            raise ConfigError(
                "on Ray, launch.replace_slow needs spare nodes, but cluster.spare_nodes is 0",
                where="cluster.spare_nodes",
                fix="set cluster.spare_nodes=1, or launch.replace_slow=false",
            )
        return
    if c.health is None or not launch.health or c.health.busbw_gbs is None:
        raise ConfigError(
            "launch.replace_slow needs the node check (launch.health) and a minimum all-reduce bandwidth "
            "(cluster.health.busbw_gbs), but at least one of the two is missing",
            where="launch.replace_slow, launch.health, cluster.health.busbw_gbs",
            fix="set launch.health=true, and cluster.health.busbw_gbs to a number of GB/s; or set "
            "launch.replace_slow=false",
        )
    if launch.array:
        raise ConfigError(
            "launch.replace_slow does not work with a job array, because the tasks of the array share a run folder",
            where="launch.replace_slow, launch.array",
            fix="set launch.array=false",
        )


def _check_gpu_precision(config: Config) -> None:
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    if config.precision is Precision.fp8 and gpu is not None and not gpu.has_fp8:
        raise ConfigError(
            f"precision is fp8, but {gpu.why_no_fp8}",
            where="precision, cluster.gpu.peak_fp8_tflops",
            fix="set precision=bf16"
            if gpu.vendor is GpuVendor.amd
            else "set precision=bf16; or, if this GPU supports FP8, set cluster.gpu.peak_fp8_tflops to its peak FP8 "
            "rate without sparsity",
        )


def _check_walltime(config: Config) -> None:
    if config.walltime is not None and config.walltime < 1:
        raise ConfigError(
            f"walltime is {config.walltime} minutes, but must be 1 or more",
            where="walltime",
            fix="set walltime to 1 or more, or to null",
        )
    if config.cluster.backend.has_queue and config.walltime is None:
        raise ConfigError(
            "a queued job needs a time limit, but walltime (minutes per trial) is null",
            where="walltime",
            fix="set walltime to the time limit of one trial in minutes",
        )
    limit = config.cluster.slurm.max_walltime_min if config.cluster.slurm else None
    job = walltime_min(config)
    if limit is not None and job is not None and job > limit:
        raise ConfigError(
            f"the job needs {job} min (walltime + 5 min for each trial, plus 5 min once), but this cluster allows jobs "
            f"of at most {limit} min",
            where="walltime, trials",
            fix="lower walltime"
            if config.launch.array
            else "lower walltime or trials, or set launch.array=true to run each trial as a separate job",
        )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
