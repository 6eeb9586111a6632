"""Refuse a kernels task whose sizes cannot be measured; each message says what is wrong, where, and the fix."""

from collections.abc import Iterator

from bench.contract.kernels import AttentionBackend, Attentions, Collectives, Copies, GemmPrecision, Gemms, Kernels
from bench.contract.schema import Config, Device, ProfileKind
from bench.errors import ConfigError
from bench.planning.estimates.parameters import linears

FP8_MULTIPLE = 16
"""N and K of an FP8 product are multiples of this; M is free. Source: torch 2.11, torch._scaled_mm."""
MAX_ELEMENTS = 2**34
"""A tensor with more numbers is a typing error: in BF16 it takes 32 GiB."""


def check(config: Config) -> None:
    """Raise ConfigError on the first size that no device can measure, or this one cannot."""
    kernels = config.task.kernels
    assert kernels is not None  # validate has seen to it
    if config.launch.profile is not ProfileKind.none:
        raise ConfigError(
            f"profile {config.launch.profile.name} is of a training step, and this task makes none",
            where="launch.profile",
            fix="set launch.profile=none: every kernel has its own record in the log",
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
            "nothing is to be measured",
            where="task.kernels",
            fix="give one of gemm, memcpy, collectives and attention, or choose task=node",
        )
    if kernels.repeats < 3 or kernels.point_s <= 0 or kernels.sustained_s <= 0:
        raise ConfigError(
            f"{kernels.repeats} runs, {kernels.point_s:g} s a point and {kernels.sustained_s:g} s without a pause",
            where="task.kernels.repeats, point_s, sustained_s",
            fix="use 3 runs or more, and times above 0",
        )
    if kernels.tolerance is not None and not 0 <= kernels.tolerance < 1:
        raise ConfigError(
            f"{kernels.tolerance:g} is not a share of a limit",
            where="task.kernels.tolerance",
            fix="set it between 0 and 1, such as 0.02, or null",
        )


def _check_tp(config: Config) -> None:
    tp, model = config.parallel.tp or 1, config.model
    sizes = {
        "attention heads": model.num_attention_heads,
        "query groups": model.num_query_groups,
        "FFN columns": model.ffn_hidden_size,
    }
    undivided = [f"{size} {what}" for what, size in sizes.items() if size % tp]
    if undivided:
        raise ConfigError(
            f"tp {tp} does not divide the {', '.join(undivided)} of {model.name}",
            where="parallel.tp",
            fix="use a divisor: the shapes are those of one of so many ranks",
        )


def _check_gemms(gemms: Gemms, config: Config) -> None:
    where = "task.kernels.gemm.shapes"
    if not gemms.shapes and not gemms.of_model and not gemms.sustained:
        raise ConfigError("no GEMM is named", where=where, fix="list [M, N, K], or set of_model=true")
    for shape in [*gemms.shapes, *gemms.sustained]:
        if len(shape) != 3 or min(shape) < 1:
            raise ConfigError(f"{shape} is not M, N and K", where=where, fix="give three numbers above 0, [M, N, K]")
        m, n, k = shape
        if max(m * n, m * k, n * k) > MAX_ELEMENTS:
            raise ConfigError(f"{shape} has a matrix of more than 2^34 numbers", where=where, fix="make it smaller")
    if gemms.precisions is not None:
        _check_precisions(gemms.precisions, config)
    if GemmPrecision.fp8 in precisions(gemms, config):
        for m, n, k in fp8_refused(gemms, config):
            raise ConfigError(
                f"[{m}, {n}, {k}] cannot be multiplied in FP8: N and K must be multiples of {FP8_MULTIPLE}",
                where=where,
                fix="use other numbers, or task.kernels.gemm.precisions=[bf16]",
            )


def precisions(gemms: Gemms, config: Config) -> list[GemmPrecision]:
    """Return what is multiplied in; the GPU of a cluster that names none is taken to have FP8."""
    gpu = config.cluster.gpu
    if gemms.precisions is not None:
        return gemms.precisions
    if config.cluster.device is not Device.cuda:
        return [GemmPrecision.fp32, GemmPrecision.bf16]
    has_fp8 = gpu is None or gpu.peak_fp8_tflops is not None
    return [GemmPrecision.bf16, *([GemmPrecision.fp8] if has_fp8 else [])]


def _check_precisions(chosen: list[GemmPrecision], config: Config) -> None:
    is_gpu, gpu = config.cluster.device is Device.cuda, config.cluster.gpu
    has_fp8 = is_gpu and (gpu is None or gpu.peak_fp8_tflops is not None)
    if not chosen or (GemmPrecision.fp8 in chosen and not has_fp8):
        device = (gpu.name if gpu else "GPU") if is_gpu else "CPU"
        raise ConfigError(
            f"GEMMs in {', '.join(one.name for one in chosen) or 'no precision'} on a {device}",
            where="task.kernels.gemm.precisions",
            fix=f"choose from {'bf16, fp8 and fp32' if has_fp8 else 'fp32 and bf16'}, or set it to null",
        )


def fp8_refused(gemms: Gemms, config: Config) -> Iterator[list[int]]:
    """Yield the shapes that FP8 does not take."""
    for m, n, k in [*gemms.shapes, *gemms.sustained, *(model_shapes(config, gemms) if gemms.of_model else {})]:
        if n % FP8_MULTIPLE or k % FP8_MULTIPLE:
            yield [m, n, k]


def model_shapes(config: Config, gemm: Gemms) -> dict[tuple[int, int, int], str]:
    """Return M, N and K of a layer's projections on a rank, as a micro-batch has them, and the projection's name."""
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
        raise ConfigError("no sizes are named", where=where, fix="list bytes, such as [1024, 1048576]")
    for size in sizes:
        if size < 1 or size % multiple or size > 2 * MAX_ELEMENTS:
            raise ConfigError(
                f"{size:,} bytes cannot be measured",
                where=where,
                fix=f"use a multiple of {multiple} up to {2 * MAX_ELEMENTS:,}{otherwise}",
            )


def _check_collectives(collectives: Collectives, num_ranks: int) -> None:
    where = "task.kernels.collectives.ranks, cluster.ranks_per_node"
    if num_ranks == 1:
        raise ConfigError(
            "a collective needs two ranks, and the job has one",
            where=where,
            fix="set cluster.ranks_per_node=2 or more, or task.kernels.collectives=null",
        )
    if not collectives.operations:
        raise ConfigError("no collective is named", where="task.kernels.collectives.operations", fix="name all_reduce")
    for count in group_sizes(collectives, num_ranks):
        if not 2 <= count <= num_ranks:
            raise ConfigError(
                f"{count} ranks cannot take part in a job of {num_ranks}", where=where, fix=f"use 2 to {num_ranks}"
            )
        other = f", or name other numbers than {count} in task.kernels.collectives.ranks"
        _check_sizes(
            collectives.sizes_bytes, "task.kernels.collectives.sizes_bytes", multiple=4 * count, otherwise=other
        )


def group_sizes(collectives: Collectives, num_ranks: int) -> list[int]:
    """Return how many ranks take part, in rising order; none in a job of one rank."""
    if collectives.ranks is not None:
        return collectives.ranks
    powers = {2**exponent for exponent in range(1, num_ranks.bit_length())}
    return sorted(count for count in powers | {num_ranks} if 2 <= count <= num_ranks)


def _check_attention(attention: Attentions, config: Config) -> None:
    where = "task.kernels.attention.seq_lengths, tokens"
    for length in attention.seq_lengths or [0]:
        if length < 1 or attention.tokens % length:
            raise ConfigError(
                f"rows of {length} tokens do not make up {attention.tokens:,}",
                where=where,
                fix="list divisors of task.kernels.attention.tokens",
            )
    is_gpu = config.cluster.device is Device.cuda
    for backend in attention.backends or []:
        if backend not in backends(is_gpu=is_gpu):
            raise ConfigError(
                f"no backend {backend.name} on a {'GPU' if is_gpu else 'CPU'}",
                where="task.kernels.attention.backends",
                fix=f"choose from {', '.join(one.name for one in backends(is_gpu=is_gpu))}, or set it to null",
            )


def backends(*, is_gpu: bool) -> list[AttentionBackend]:
    """Return the backends that torch has for a device."""
    return list(AttentionBackend) if is_gpu else [AttentionBackend.math, AttentionBackend.flash]
