"""Split the ranks of a job into tp, pp, cp and dp, and refuse impossible splits."""

from bench.contract.plan import World
from bench.contract.schema import Config, Device, Precision
from bench.contract.training import Trains
from bench.errors import ConfigError
from bench.planning.estimates.parameters import linears

FP8_MULTIPLE = 16
"""The dimensions of an FP8 GEMM are multiples of this. Source: torch 2.11, torch._scaled_mm."""
NF4_BLOCK = 64
"""Weights that share a scale in 4 bits. Source: Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3."""


def split(config: Config, *, tp: int, pp: int, cp: int, sp: bool) -> World:
    """Return the ranks of the cluster, split over tp, pp and cp; the rest is data parallel.

    Source: megatron-core 0.16.1, initialize_model_parallel.
    """
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    return World(
        num_nodes=config.cluster.num_nodes,
        ranks_per_node=config.cluster.ranks_per_node,
        num_ranks=num_ranks,
        dp=num_ranks // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=config.parallel.vpp,
        sp=sp,
        ep=config.parallel.ep,
    )


def num_microbatches(config: Config, world: World) -> int:
    """Return how many micro-batches every replica computes in one optimizer step."""
    return config.training_recipe.global_batch_size // (world.dp * config.training_recipe.micro_batch(world.dp))


def tokens(config: Config, world: World) -> float:
    """Return how many tokens of one micro-batch one rank computes."""
    return config.training_recipe.micro_batch(world.dp) * config.training_data.seq_length / world.cp


def check(config: Config, world: World) -> None:
    """Raise ConfigError if the ranks, the model, a row or the batch cannot be split this way."""
    check_tensor_parallel(config, world)
    _check_pipeline(config, world)
    _check_sequence(config, world)
    _check_ranks(world)
    _check_experts(config, world)
    _check_fp8_gemms(config, world)
    _check_4_bit_blocks(config, world)
    _check_batch(config, world)


def check_tensor_parallel(config: Config, world: World) -> None:
    """Raise ConfigError if tp does not divide the model, or spans several nodes."""
    tp, m, per_node = world.tp, config.model, config.cluster.ranks_per_node
    unit = "GPUs" if config.cluster.device is Device.cuda else "ranks"

    sizes = {
        "attention heads": m.num_attention_heads,
        "query groups": m.num_query_groups,
        "FFN columns": m.mlp_size,
        "vocabulary entries": m.vocab_size,
    }

    def undivided(tp: int) -> list[str]:
        return [f"{size} {name}" for name, size in sizes.items() if size % tp]

    def legal() -> str:
        return _listed([n for n in range(1, per_node + 1) if not undivided(n)])

    if undivided_sizes := undivided(tp):
        raise ConfigError(
            f"tp {tp} does not divide the {', '.join(undivided_sizes)} of {m.name}",
            where="parallel.tp",
            fix=f"set parallel.tp to one of {legal()}",
        )
    if tp > per_node:
        raise ConfigError(
            f"tp is {tp}, but tensor parallelism must stay within a node, which has {per_node} {unit}",
            where="parallel.tp, cluster.ranks_per_node",
            fix=f"set parallel.tp to one of {legal()}",
        )


def _check_pipeline(config: Config, world: World) -> None:
    layers = config.model.num_layers
    if layers % (world.pp * world.vpp):
        raise ConfigError(
            f"{layers} layers cannot be split evenly over pp {world.pp} x vpp {world.vpp}",
            where="parallel.pp, parallel.vpp",
            fix=f"set parallel.pp and parallel.vpp so that pp x vpp is one of {_listed(divisors(layers))}",
        )
    if world.vpp > 1 and world.pp == 1:
        raise ConfigError(
            f"vpp is {world.vpp}, which needs a pipeline of two or more stages, but pp is 1",
            where="parallel.vpp",
            fix="set parallel.pp to 2 or more, or parallel.vpp=1",
        )


def _check_sequence(config: Config, world: World) -> None:
    seq_length = config.training_data.seq_length
    if world.cp > 1 and config.training_data.document_mask:
        raise ConfigError(
            f"cp is {world.cp}, but context parallelism splits documents and does not support a document mask",
            where="parallel.cp, data.document_mask",
            fix="set parallel.cp=1, or data.document_mask=false",
        )
    if world.cp > 1 and seq_length % (2 * world.cp):
        raise ConfigError(
            f"context parallelism splits a sequence into 2 x cp = {2 * world.cp} equal chunks, but a sequence has "
            f"{seq_length} tokens",
            where="parallel.cp, data.seq_length",
            fix=f"set data.seq_length to a multiple of {2 * world.cp}, or lower parallel.cp",
        )
    if world.sp and world.tp == 1:
        raise ConfigError(
            "sequence parallelism (sp) needs tp of 2 or more, but tp is 1",
            where="parallel.sp",
            fix="set parallel.sp=false, or set parallel.tp to 2 or more",
        )
    if world.sp and seq_length % (world.tp * world.cp):
        raise ConfigError(
            f"sequence parallelism splits a sequence over tp x cp = {world.tp} x {world.cp} ranks, but "
            f"data.seq_length={seq_length} is not a multiple of this product",
            where="parallel.sp",
            fix="set parallel.sp=false, or change parallel.tp, parallel.cp or data.seq_length",
        )


def _check_ranks(world: World) -> None:
    per_replica = world.tp * world.pp * world.cp
    if world.num_ranks % per_replica:
        raise ConfigError(
            f"{world.num_ranks} ranks cannot be split into replicas of tp {world.tp} x pp {world.pp} x cp {world.cp} "
            f"= {per_replica} ranks",
            where="parallel.tp, parallel.pp, parallel.cp",
            fix=f"set parallel.tp, parallel.pp and parallel.cp so that tp x pp x cp is one of "
            f"{_listed(divisors(world.num_ranks))}; or set cluster.ranks_per_node={per_replica}",
        )


def _check_experts(config: Config, world: World) -> None:
    """Raise ConfigError if the replicas cannot share the experts, or the experts' layer does not support the split."""
    replicas = world.dp * world.cp
    if replicas % world.ep:
        raise ConfigError(
            f"ep is {world.ep}, but must divide dp x cp = {world.dp} x {world.cp} = {replicas}",
            where="parallel.ep",
            fix=f"set parallel.ep to one of {_listed(divisors(replicas))}",
        )
    if config.model.experts is not None and world.tp > 1 and not world.sp:
        raise ConfigError(
            f"tensor parallelism of a model with experts needs sequence parallelism, but tp is {world.tp} and sp is "
            "false",
            where="parallel.tp, parallel.sp",
            fix="set parallel.sp=true, or parallel.tp=1",
        )


def _check_fp8_gemms(config: Config, world: World) -> None:
    if config.precision is not Precision.fp8:
        return
    for name, linear in linears(config.model).items():
        columns, rows = linear.num_in, linear.num_out
        columns, rows = (columns, rows // world.tp) if linear.is_column else (columns // world.tp, rows)
        if columns % FP8_MULTIPLE or rows % FP8_MULTIPLE:
            raise ConfigError(
                f"FP8 GEMMs need rows and columns in multiples of {FP8_MULTIPLE}, but {name} has {rows} rows and "
                f"{columns} columns on each rank",
                where="precision, parallel.tp",
                fix="set precision=bf16" + (", or lower parallel.tp" if world.tp > 1 else ""),
            )


def _check_4_bit_blocks(config: Config, world: World) -> None:
    """Raise ConfigError if a quantization block of the 4-bit base would span two ranks."""
    if config.training.trains is not Trains.qlora:
        return
    for name, linear in linears(config.model).items():
        columns = linear.num_in if linear.is_column else linear.num_in // world.tp
        if columns % NF4_BLOCK:
            raise ConfigError(
                f"4-bit weights need a multiple of {NF4_BLOCK} columns, but {name} has {columns} columns on each rank",
                where="task.training.trains, parallel.tp",
                fix="set task.training.trains=lora" + (", or lower parallel.tp" if world.tp > 1 else ""),
            )


def _check_batch(config: Config, world: World) -> None:
    r, dp = config.training_recipe, world.dp
    micro_batch_size = r.micro_batch(dp)
    per_step = dp * micro_batch_size
    if r.global_batch_size % per_step:
        legal = divisors(r.global_batch_size)
        raise ConfigError(
            f"the global batch size is {r.global_batch_size}, but must be a multiple of dp x micro-batch size = {dp} x "
            f"{micro_batch_size}",
            where="recipe.global_batch_size, recipe.micro_batch_size",
            fix=f"set recipe.global_batch_size to a multiple of {per_step}; or change recipe.micro_batch_size or the "
            f"number of ranks, so that dp x micro-batch size is one of {_listed(legal)}",
        )
    accumulation = r.global_batch_size // per_step
    if world.vpp > 1 and accumulation % world.pp:
        raise ConfigError(
            f"the number of micro-batches in a step is {accumulation}, but with vpp {world.vpp} it must be a multiple "
            f"of pp, which is {world.pp}",
            where="parallel.vpp, recipe.micro_batch_size",
            fix="set parallel.vpp=1, or change recipe.micro_batch_size so that global_batch_size / (dp x "
            f"micro_batch_size) is a multiple of {world.pp}",
        )


def divisors(n: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
