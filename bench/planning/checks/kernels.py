"""Checks of a kernels task: refuse sizes that cannot be measured."""

from collections.abc import Iterator

from bench.contract.cluster import GpuVendor
from bench.contract.kernels import AttentionBackend, Attentions, Collectives, Copies, GemmPrecision, Gemms, Kernels
from bench.contract.schema import Config, Device, ProfileKind
from bench.errors import ConfigError
from bench.planning.estimates.parameters import linears
from bench.texts import counted, with_article

FP8_MULTIPLE = 16
"""N and K of an FP8 GEMM must be multiples of this; M is free. Source: torch 2.11, torch._scaled_mm."""
MAX_ELEMENTS = 2**34
"""Maximum elements of a tensor (32 GiB in BF16); more is a typing error."""


def check(config: Config) -> None:
    """Raise ConfigError for the first size that cannot be measured on this device."""
    kernels = config.task.kernels
    assert kernels is not None  # a task of this kind has the block
    if config.launch.profile is not ProfileKind.none:
        raise ConfigError(
            f"launch.profile={config.launch.profile.name} needs training steps, but this task does not train",
            where="launch.profile",
            fix="set launch.profile=none; even then, the log of this task has the time of each kernel",
        )
    _check_amounts(kernels)
    _check_tp(config)
    if kernels.gemm is not None:
        _check_gemms(kernels.gemm, config)
    if kernels.memcpy is not None:
        _check_copies(kernels.memcpy)
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    if kernels.collectives is not None:
        are_all = kernels.gemm is None and kernels.memcpy is None and kernels.attention is None
        if num_ranks > 1 or are_all or kernels.collectives.ranks is not None:
            _check_collectives(kernels.collectives, num_ranks)
    if kernels.attention is not None:
        _check_attention(kernels.attention, config)


def _check_amounts(kernels: Kernels) -> None:
    families = (kernels.gemm, kernels.memcpy, kernels.collectives, kernels.attention)
    if all(family is None for family in families):
        raise ConfigError(
            "the task has no kernel to measure: gemm, memcpy, collectives and attention are all null",
            where="task.kernels",
            fix="set at least one of these four blocks, or choose task=node",
        )
    if kernels.repeats < 3:
        raise ConfigError(
            f"task.kernels.repeats is {kernels.repeats}, but must be 3 or more",
            where="task.kernels.repeats",
            fix="set task.kernels.repeats to 3 or more",
        )
    for key, seconds in (("point_s", kernels.point_s), ("sustained_s", kernels.sustained_s)):
        if seconds <= 0:
            raise ConfigError(
                f"task.kernels.{key} is {seconds:g} seconds, but must be above 0",
                where=f"task.kernels.{key}",
                fix=f"set task.kernels.{key} to a number of seconds above 0",
            )
    if kernels.tolerance is not None and not 0 <= kernels.tolerance < 1:
        raise ConfigError(
            f"task.kernels.tolerance is {kernels.tolerance:g}, but must be 0 or more, and below 1",
            where="task.kernels.tolerance",
            fix="set task.kernels.tolerance to a share such as 0.02, or to null",
        )


def _check_tp(config: Config) -> None:
    tp, model = config.parallel.tp or 1, config.model
    sizes = {
        "attention heads": model.num_attention_heads,
        "query groups": model.num_query_groups,
        "FFN columns": model.ffn_hidden_size,
    }
    undivided_sizes = [f"{size} {name}" for name, size in sizes.items() if size % tp]
    if undivided_sizes:
        raise ConfigError(
            f"tp {tp} does not divide the {', '.join(undivided_sizes)} of {model.name}",
            where="parallel.tp",
            fix="set parallel.tp to a divisor of these sizes, because the task measures the shapes of one TP rank",
        )


def _check_gemms(gemms: Gemms, config: Config) -> None:
    if not gemms.shapes and not gemms.from_model and not gemms.sustained:
        raise ConfigError(
            "the list of GEMM shapes is empty",
            where="task.kernels.gemm.shapes",
            fix="list shapes [M, N, K], or set task.kernels.gemm.from_model=true",
        )
    for shape in [*gemms.shapes, *gemms.sustained]:
        where = _key_of(shape, gemms)
        if len(shape) != 3 or min(shape) < 1:
            raise ConfigError(
                f"{shape} is not a valid shape [M, N, K]", where=where, fix="write three integers above 0"
            )
        m, n, k = shape
        if max(m * n, m * k, n * k) > MAX_ELEMENTS:
            raise ConfigError(
                f"the shape {shape} has a matrix with more than 2^34 elements", where=where, fix="lower M, N or K"
            )
    if gemms.precisions is not None:
        _check_precisions(gemms.precisions, config)
    if GemmPrecision.fp8 in precisions(gemms, config):
        for m, n, k in fp8_refused(gemms, config):
            raise ConfigError(
                f"the shape [{m}, {n}, {k}] is not possible in FP8: N and K must be multiples of {FP8_MULTIPLE}",
                where=_key_of([m, n, k], gemms),
                fix="change N and K, or set task.kernels.gemm.precisions=[bf16]",
            )


def _key_of(shape: list[int], gemms: Gemms) -> str:
    """Return the key that sets a shape."""
    is_sustained = shape in gemms.sustained and shape not in gemms.shapes
    return "task.kernels.gemm.sustained" if is_sustained else "task.kernels.gemm.shapes"


def precisions(gemms: Gemms, config: Config) -> list[GemmPrecision]:
    """Return the precisions of the GEMMs. If the cluster gives no GPU, FP8 is assumed to be supported."""
    gpu = config.cluster.gpu
    if gemms.precisions is not None:
        return gemms.precisions
    if config.cluster.device is not Device.cuda:
        return [GemmPrecision.fp32, GemmPrecision.bf16]
    has_fp8 = gpu is None or gpu.has_fp8
    return [GemmPrecision.bf16, *([GemmPrecision.fp8] if has_fp8 else [])]


def _check_precisions(chosen: list[GemmPrecision], config: Config) -> None:
    is_gpu, gpu = config.cluster.device is Device.cuda, config.cluster.gpu
    has_fp8 = is_gpu and (gpu is None or gpu.has_fp8)
    if not chosen or (GemmPrecision.fp8 in chosen and not has_fp8):
        device = with_article((gpu.name if gpu else "GPU") if is_gpu else "CPU")
        why = f"{device} does not support GEMMs in FP8"
        if is_gpu and gpu is not None and gpu.vendor is GpuVendor.amd:
            why = gpu.why_no_fp8
        raise ConfigError(
            f"task.kernels.gemm.precisions contains fp8, but {why}"
            if chosen
            else "the list of the precisions of GEMMs is empty",
            where="task.kernels.gemm.precisions",
            fix=f"list one or more of {'bf16, fp8 and fp32' if has_fp8 else 'fp32 and bf16'}, or set the key to null",
        )


def fp8_refused(gemms: Gemms, config: Config) -> Iterator[list[int]]:
    """Yield the shapes that FP8 does not support."""
    for m, n, k in [*gemms.shapes, *gemms.sustained, *(model_shapes(config, gemms) if gemms.from_model else {})]:
        if n % FP8_MULTIPLE or k % FP8_MULTIPLE:
            yield [m, n, k]


def model_shapes(config: Config, gemm: Gemms) -> dict[tuple[int, int, int], str]:
    """Return (M, N, K) of a layer's projections for one micro-batch on a TP rank, with the projection's name."""
    tp, tokens = config.parallel.tp or 1, gemm.model_tokens
    shapes = {}
    for name, linear in linears(config.model).items():
        n, k = (linear.num_out // tp, linear.num_in) if linear.is_column else (linear.num_out, linear.num_in // tp)
        shapes[tokens, n, k] = name
    return shapes


def _check_copies(copies: Copies) -> None:
    _check_sizes(copies.sizes_bytes, "task.kernels.memcpy.sizes_bytes", multiple=1)


def _check_sizes(sizes: list[int], where: str, *, multiple: int, otherwise: str = "") -> None:
    if not sizes:
        raise ConfigError(
            "the list of message sizes is empty", where=where, fix="list sizes in bytes, such as [1024, 1048576]"
        )
    max_size = 2 * MAX_ELEMENTS
    allowed = f"a number from 1 to {max_size:,}"
    if multiple > 1:
        allowed = f"a multiple of {multiple} from {multiple} to {max_size:,}"
    for size in sizes:
        if size < 1 or size % multiple or size > max_size:
            raise ConfigError(
                f"a message size is {size:,} bytes, but must be {allowed}",
                where=where,
                fix=f"set the size to {allowed}{otherwise}",
            )


def _check_collectives(collectives: Collectives, num_ranks: int) -> None:
    where = "task.kernels.collectives.ranks, cluster.ranks_per_node"
    if num_ranks == 1:
        raise ConfigError(
            "a collective needs at least two ranks, but the job has only one rank",
            where=where,
            fix="set cluster.ranks_per_node to 2 or more, or set task.kernels.collectives=null",
        )
    if not collectives.operations:
        raise ConfigError(
            "the list of collective operations is empty",
            where="task.kernels.collectives.operations",
            fix="list operations, such as [all_reduce], or set task.kernels.collectives=null",
        )
    for count in group_sizes(collectives, num_ranks):
        if not 2 <= count <= num_ranks:
            raise ConfigError(
                f"a collective of {counted(count, 'rank')} is not possible in a job of {num_ranks} ranks",
                where=where,
                fix=f"set task.kernels.collectives.ranks to numbers from 2 to {num_ranks}"
                if num_ranks > 2
                else "set task.kernels.collectives.ranks=[2]",
            )
        other = f"; or replace {count} in task.kernels.collectives.ranks by another number of ranks"
        _check_sizes(
            collectives.sizes_bytes, "task.kernels.collectives.sizes_bytes", multiple=4 * count, otherwise=other
        )


def group_sizes(collectives: Collectives, num_ranks: int) -> list[int]:
    """Return the group sizes in ascending order; empty in a job of one rank."""
    if collectives.ranks is not None:
        return collectives.ranks
    powers = {2**exponent for exponent in range(1, num_ranks.bit_length())}
    return sorted(count for count in powers | {num_ranks} if 2 <= count <= num_ranks)


def _check_attention(attention: Attentions, config: Config) -> None:
    where = "task.kernels.attention.seq_lengths, tokens"
    if not attention.seq_lengths and not attention.batches:
        raise ConfigError(
            "the list of sequence lengths is empty",
            where="task.kernels.attention.seq_lengths",
            fix="list divisors of task.kernels.attention.tokens, or use task.kernels.attention.batches instead",
        )
    for length in attention.seq_lengths:
        if length < 1 or attention.tokens % length:
            raise ConfigError(
                f"{attention.tokens:,} tokens cannot be divided into sequences of {length} tokens",
                where=where,
                fix="set task.kernels.attention.seq_lengths to divisors of task.kernels.attention.tokens, or use "
                "task.kernels.attention.batches instead",
            )
    for batch in attention.batches:
        if len(batch) != 2 or min(batch) < 1:
            raise ConfigError(
                f"{batch} is not a valid batch [sequences, tokens of a sequence]",
                where="task.kernels.attention.batches",
                fix="write a batch as two integers above 0",
            )
    is_gpu = config.cluster.device is Device.cuda
    for backend in attention.backends or []:
        if backend not in backends(is_gpu=is_gpu):
            raise ConfigError(
                f"the attention backend {backend.name} does not exist on a {'GPU' if is_gpu else 'CPU'}",
                where="task.kernels.attention.backends",
                fix=f"list one or more of {', '.join(known.name for known in backends(is_gpu=is_gpu))}, or set the key "
                "to null",
            )


def backends(*, is_gpu: bool) -> list[AttentionBackend]:
    """Return torch's attention backends for a device."""
    return list(AttentionBackend) if is_gpu else [AttentionBackend.math, AttentionBackend.flash]
