"""What a kernels task measures: settings for each family of kernels, and the points that a plan makes of them."""

from dataclasses import dataclass, field
from enum import Enum


class GemmPrecision(Enum):
    """The numbers that are multiplied; fp8 is E4M3 with one scale a row, and its product is BF16."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"


class Copy(Enum):
    """Between which memories bytes are copied; peer: to the next GPU of the node."""

    host_to_device = "host_to_device"
    device_to_host = "device_to_host"
    device = "device"
    peer = "peer"


class Collective(Enum):
    """What a group of ranks does together, by NCCL's names."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    reduce = "reduce"
    all_to_all = "all_to_all"


class AttentionBackend(Enum):
    """The kernels that torch's scaled_dot_product_attention has; math is the one without flash."""

    math = "math"
    efficient = "efficient"
    flash = "flash"
    cudnn = "cudnn"


@dataclass(slots=True, kw_only=True)
class Gemms:
    """Matrix products of M x K and K x N numbers."""

    shapes: list[list[int]]
    """M, N and K of each."""
    of_model: bool
    """Those of a layer of the model besides, as a micro-batch has them on a rank of parallel.tp."""
    model_tokens: int
    """Tokens of that micro-batch: its rows times their length."""
    precisions: list[GemmPrecision] | None = None
    """None: all that the device has (BF16 and FP8 on a GPU, FP32 and BF16 on a CPU)."""
    sustained: list[list[int]] = field(default_factory=list)
    """Shapes that are measured without a pause, too."""


@dataclass(slots=True, kw_only=True)
class Copies:
    """Memory copies of one rank, one way at a time; between host and device from pinned memory and from other."""

    sizes_bytes: list[int]


@dataclass(slots=True, kw_only=True)
class Collectives:
    """Collectives of the first ranks of the job."""

    operations: list[Collective]
    sizes_bytes: list[int]
    """Of a rank's whole buffer, as nccl-tests count it: for all_gather the gathered, for reduce_scatter the scattered
    tensor."""
    ranks: list[int] | None = None
    """How many ranks take part. None: 2, 4, 8, … and all."""


@dataclass(slots=True, kw_only=True)
class Attentions:
    """Causal attention with the heads of the model on a rank of parallel.tp, forward and backward."""

    tokens: int
    """Of one call: rows of seq_lengths[i] tokens, as many as make up so many tokens."""
    seq_lengths: list[int]
    backends: list[AttentionBackend] | None = None
    """None: all that the device has."""
    math_up_to: int
    """The longest rows for `math`, which stores a score for every pair of tokens."""


@dataclass(slots=True, kw_only=True)
class Limits:
    """The best rates known of a GPU's kernels and links, each by itself; None where none is known."""

    gpu: str
    """cluster.gpu.name."""
    source: str
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    attention_forward_tflops: float | None = None
    attention_backward_tflops: float | None = None
    host_to_device_gbs: float | None = None
    device_to_host_gbs: float | None = None
    """From pinned memory, while no other GPU of the node copies."""
    device_gbs: float | None = None
    """Bytes read plus bytes written."""
    peer_gbs: float | None = None
    """One way."""
    ranks: int | None = None
    """Of how many ranks of one node the bus bandwidths below are."""
    all_reduce_gbs: float | None = None
    all_gather_gbs: float | None = None
    reduce_scatter_gbs: float | None = None


@dataclass(slots=True, kw_only=True)
class Kernels:
    """What is measured, and how often. A family that is None is not measured."""

    gemm: Gemms | None = None
    memcpy: Copies | None = None
    collectives: Collectives | None = None
    attention: Attentions | None = None
    repeats: int
    """Short runs of each point, with a pause before each GEMM and each attention, so that the device stays cool."""
    point_s: float
    """A point that would take longer has fewer runs, three at least."""
    sustained_s: float
    """How long a sustained point goes on, after a quarter of that for the device to get hot."""
    limits: list[Limits] = field(default_factory=list)
    tolerance: float | None = None
    """The share of its limit by which the best point of a kernel may miss it. None: rates decide nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing to measure."""

    name: str
    """Of all of it, unique in the plan: `gemm bf16 4096 x 11008 x 4096`."""
    kernel: str
    """What points have in common that are held against one limit: `gemm bf16`."""
    family: str
    """gemm, memcpy, collectives or attention."""
    operation: str
    """gemm; a Copy; a Collective; forward or backward."""
    variant: str
    """The precision of a GEMM; pinned or pageable; what a collective sends; the backend of attention."""
    sizes: list[int]
    """M, N, K; bytes; bytes; batch, heads, key and value heads, tokens of a row, size of a head."""
    ranks: int
    """How many take part together. GEMMs, copies and attention are measured by every rank for itself at one time."""
    is_sustained: bool
    work: float
    """Floating-point operations, or bytes, of one call on one rank."""
    unit: str
    """Of its rate: TFLOP/s or GB/s, both in powers of ten."""
    peak: float | None
    """The peak rate by the data sheet."""
    limit: float | None
    """The best rate known, which the best point of this kernel is held against."""
