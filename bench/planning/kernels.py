"""The points of a kernels task: every GEMM, copy, collective and attention kernel that is measured, with its work.

| kernel                        | work of one call                                             | source            |
| ----------------------------- | ------------------------------------------------------------ | ----------------- |
| M x K times K x N             | 2 M N K operations                                           |                   |
| causal attention, forward     | 4 d times the S (S + 1) / 2 scores that are not masked, for  | Dao 2023, FA 2    |
|                               | each row and head (d: size of a head)                        |                   |
| causal attention, backward    | 2.5 times as many: five GEMMs, where forward has two         | Dao 2023, FA 2    |
| copy between two memories     | the bytes, one way                                           | nvbandwidth       |
| copy within one memory        | the bytes read plus the bytes written                        | STREAM            |
| all_reduce of n ranks         | 2 (n - 1) / n times the bytes of the buffer                  | nccl-tests        |
| all_gather, reduce_scatter,   | (n - 1) / n times the bytes of the whole buffer              | nccl-tests        |
| all_to_all                    |                                                              |                   |
| reduce                        | the bytes                                                    | nccl-tests        |

The rate of a collective is therefore its bus bandwidth. It can exceed the bandwidth of a link if the switch reduces
(NVLink SHARP): then fewer bytes cross a link than in the ring algorithm, which the factors assume.
"""

from collections.abc import Callable, Iterator

from bench.contract.kernels import (
    AttentionBackend,
    Attentions,
    Collective,
    Collectives,
    Copies,
    Copy,
    GemmPrecision,
    Gemms,
    Limits,
    Point,
)
from bench.contract.plan_kinds import KernelsPlan
from bench.contract.schema import Config, Device, Gpu
from bench.errors import ConfigError
from bench.planning.checks import kernels
from bench.planning.commands import fields_of_all
from bench.planning.parallelism import split

TFLOPS, GBS = "TFLOP/s", "GB/s"
LEAST_CALLS = 5
"""Minimum number of calls of a point, including warm-up. Source: jobs/kernels/timing.py."""
CPU_FLOPS, MAX_CPU_S = 50e9, 1800
"""FLOP/s of a rank with one thread, and the longest estimated run on CPUs; larger lists are meant for GPUs. Assumed."""
COPIES = {
    Copy.host_to_device: "host to device",
    Copy.device_to_host: "device to host",
    Copy.device: "within device",
    Copy.peer: "to next device",
}
BACKWARD = 2.5
"""Ratio of attention's backward FLOPs to its forward FLOPs."""
BUS_SHARE: dict[Collective, Callable[[int], float]] = {
    Collective.all_reduce: lambda n: 2 * (n - 1) / n,
    Collective.all_gather: lambda n: (n - 1) / n,
    Collective.reduce_scatter: lambda n: (n - 1) / n,
    Collective.all_to_all: lambda n: (n - 1) / n,
    Collective.reduce: lambda n: 1.0,
}
"""Source: NVIDIA nccl-tests, doc/PERFORMANCE.md."""


def points(config: Config) -> list[Point]:
    """Return the points in the order of measurement: links first, kernels that heat the device last.

    Raises:
        ConfigError: a family has no points, or a CPU would need more than MAX_CPU_S.
    """
    kernels = config.task.kernels
    assert kernels is not None  # a task of this kind has the block
    every = [
        *(_copies(kernels.memcpy, config) if kernels.memcpy else ()),
        *(_collectives(kernels.collectives, config) if kernels.collectives else ()),
        *(_attention(kernels.attention, config) if kernels.attention else ()),
        *(_gemms(kernels.gemm, config) if kernels.gemm else ()),
    ]
    _check_families(every, config)
    once = list({point.name: point for point in every}.values())  # a size may be listed twice
    if config.cluster.device is Device.cpu:
        _check_cpu_time(once)
    return once


def _check_families(points: list[Point], config: Config) -> None:
    """Refuse a family without points; in a job of one rank, collectives are skipped."""
    has_points = {point.family for point in points}
    if config.cluster.num_nodes * config.cluster.ranks_per_node == 1:
        has_points.add("collectives")
    for family in ("memcpy", "collectives", "attention", "gemm"):
        if getattr(config.task.kernels, family) is not None and family not in has_points:
            raise ConfigError(
                f"the lists of task.kernels.{family} are empty, so there is no kernel to measure",
                where=f"task.kernels.{family}",
                fix=f"add entries to the lists, or set task.kernels.{family}=null",
            )


def _check_cpu_time(points: list[Point]) -> None:
    work = sum(point.work for point in points if point.unit == TFLOPS) * LEAST_CALLS
    if work / CPU_FLOPS > MAX_CPU_S:
        raise ConfigError(
            f"{work / 1e12:,.0f} TFLOP of GEMMs and attention would take about {work / CPU_FLOPS / 3600:,.1f} hours "
            f"on a CPU (assuming {CPU_FLOPS / 1e9:g} GFLOP/s)",
            where="task.kernels.gemm.shapes, task.kernels.attention, cluster.device",
            fix="choose task=kernels_tiny, list smaller shapes, or set cluster.device=cuda",
        )


def limits(config: Config) -> Limits | None:
    """Return the best known rates of the cluster's GPU; None if there are none."""
    gpu, kernels = _gpu(config), config.task.kernels
    assert kernels is not None
    return next((one for one in kernels.limits if gpu is not None and one.gpu == gpu.name), None)


def _gpu(config: Config) -> Gpu | None:
    return config.cluster.gpu if config.cluster.device is Device.cuda else None


def _gemms(gemms: Gemms, config: Config) -> Iterator[Point]:
    """Yield every shape in every precision, then the sustained measurements."""
    listed = [(m, n, k) for m, n, k in gemms.shapes]
    shapes = list(dict.fromkeys([*listed, *(kernels.model_shapes(config, gemms) if gemms.from_model else ())]))
    sustained = [(m, n, k) for m, n, k in gemms.sustained]
    for precision in kernels.precisions(gemms, config):
        for shape in shapes:
            yield _gemm(shape, precision, config, is_sustained=False)
        for shape in dict.fromkeys(sustained):
            yield _gemm(shape, precision, config, is_sustained=True)


def _gemm(shape: tuple[int, int, int], precision: GemmPrecision, config: Config, *, is_sustained: bool) -> Point:
    m, n, k = shape
    gpu, known = _gpu(config), limits(config)
    peaks = {GemmPrecision.bf16: gpu.peak_bf16_tflops, GemmPrecision.fp8: gpu.peak_fp8_tflops} if gpu else {}
    best = {GemmPrecision.bf16: known.bf16_tflops, GemmPrecision.fp8: known.fp8_tflops} if known else {}
    kernel = f"gemm {precision.name}{' sustained' if is_sustained else ''}"
    return Point(
        name=f"{kernel} {m} x {n} x {k}",
        kernel=kernel,
        family="gemm",
        operation="gemm",
        variant=precision.name,
        sizes=[m, n, k],
        ranks=1,
        is_sustained=is_sustained,
        work=2.0 * m * n * k,
        unit=TFLOPS,
        peak=peaks.get(precision),
        limit=None if is_sustained else best.get(precision),
    )


def _copies(copies: Copies, config: Config) -> Iterator[Point]:
    """Yield the copies that the device supports; host-link limits apply only if a single GPU copies."""
    per_node, is_gpu, known = config.cluster.ranks_per_node, _gpu_is_there(config), limits(config)
    alone = known if per_node == 1 else None
    ways = [(Copy.device, "device", known.device_gbs if known else None)]
    if is_gpu:
        to, back = (alone.host_to_device_gbs, alone.device_to_host_gbs) if alone else (None, None)
        ways = [(Copy.host_to_device, "pinned", to), (Copy.device_to_host, "pinned", back), *ways]
        ways += [(Copy.host_to_device, "pageable", None), (Copy.device_to_host, "pageable", None)]
    if is_gpu and per_node > 1:
        ways.append((Copy.peer, "device", known.peer_gbs if known else None))
    for way, memory, limit in ways:
        for size in copies.sizes_bytes:
            work = 2.0 * size if way is Copy.device else float(size)
            kernel = f"copy {COPIES[way]}{f' {memory}' if memory != 'device' else ''}"
            yield _of_bytes(kernel, "memcpy", way.name, memory, size=size, ranks=1, work=work, limit=limit)


def _gpu_is_there(config: Config) -> bool:
    return config.cluster.device is Device.cuda


def _of_bytes(
    kernel: str, family: str, operation: str, variant: str, *, size: int, ranks: int, work: float, limit: float | None
) -> Point:
    return Point(
        name=f"{kernel} {size_text(size)}",
        kernel=kernel,
        family=family,
        operation=operation,
        variant=variant,
        sizes=[size],
        ranks=ranks,
        is_sustained=False,
        work=work,
        unit=GBS,
        peak=None,
        limit=limit,
    )


def size_text(size: int) -> str:
    """Format bytes in the largest binary unit that divides them."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} bytes"


def _collectives(collectives: Collectives, config: Config) -> Iterator[Point]:
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    dtype = "bf16" if _gpu_is_there(config) else "fp32"
    for operation in collectives.operations:
        for count in kernels.group_sizes(collectives, num_ranks):
            for size in collectives.sizes_bytes:
                kernel = f"{operation.name.replace('_', '-')} of {count} ranks"
                limit, work = _bus_limit(operation, count, config), BUS_SHARE[operation](count) * size
                yield _of_bytes(
                    kernel, "collectives", operation.name, dtype, size=size, ranks=count, work=work, limit=limit
                )


def _bus_limit(operation: Collective, count: int, config: Config) -> float | None:
    """Return the best known bus bandwidth of `count` ranks on one node."""
    known = limits(config)
    if known is None or known.ranks != count or config.cluster.ranks_per_node < count:
        return None
    return {
        Collective.all_reduce: known.all_reduce_gbs,
        Collective.all_gather: known.all_gather_gbs,
        Collective.reduce_scatter: known.reduce_scatter_gbs,
    }.get(operation)


def _attention(attention: Attentions, config: Config) -> Iterator[Point]:
    tp, model, known = config.parallel.tp or 1, config.model, limits(config)
    head = model.head_size
    heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
    best = {"forward": known.attention_forward_tflops, "backward": known.attention_backward_tflops} if known else {}
    every = kernels.backends(is_gpu=_gpu_is_there(config))
    for backend in every if attention.backends is None else attention.backends:
        batches = [(attention.tokens // length, length) for length in attention.seq_lengths]
        for rows, length in (*batches, *((rows, length) for rows, length in attention.batches)):
            if backend is AttentionBackend.math and length > attention.math_max_seq_length:
                continue
            sizes = [rows, heads, groups, length, head]
            for way in ("forward", "backward"):
                yield _of_attention(way, backend, sizes, config, limit=best.get(way))


def _of_attention(
    way: str, backend: AttentionBackend, sizes: list[int], config: Config, *, limit: float | None
) -> Point:
    batch, heads, groups, length, head = sizes
    gpu = _gpu(config)
    scores = batch * heads * length * (length + 1) / 2
    return Point(
        name=f"attention {way} {backend.name} {batch} x {length}, {heads} heads of {head}, {groups} of keys",
        kernel=f"attention {way}",
        family="attention",
        operation=way,
        variant=backend.name,
        sizes=sizes,
        ranks=1,
        is_sustained=False,
        work=4 * head * scores * (BACKWARD if way == "backward" else 1),
        unit=TFLOPS,
        peak=gpu.peak_bf16_tflops if gpu else None,
        limit=limit,
    )


def make(config: Config, base: Config | None) -> KernelsPlan:
    """Return the plan of a kernels run."""
    return KernelsPlan(**fields_of_all(config), world=split(config, tp=1, pp=1, cp=1, sp=False), points=points(config))
