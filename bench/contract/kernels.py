"""Settings of a kernels task by kernel family, and the measured points of its plan."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class GemmPrecision(Enum):
    """The precision of the operands; fp8 is E4M3 with one scale per row and a BF16 result."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"


class Copy(Enum):
    """Source and target memory of a copy; peer: to the next GPU of the node."""

    host_to_device = "host_to_device"
    device_to_host = "device_to_host"
    device = "device"
    peer = "peer"


class Collective(Enum):
    """Collective operations, by NCCL's names."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    reduce = "reduce"
    all_to_all = "all_to_all"


class AttentionBackend(Enum):
    """The backends of torch's scaled_dot_product_attention; math is the unfused one."""

    math = "math"
    efficient = "efficient"
    flash = "flash"
    cudnn = "cudnn"


@dataclass(slots=True, kw_only=True)
class Gemms:
    """GEMMs of M x K and K x N matrices."""

    shapes: list[list[int]]
    """M, N and K of each."""
    from_model: bool
    """Also measure the GEMMs of a layer of the model, for one micro-batch on a rank of parallel.tp."""
    model_tokens: int
    """Tokens of that micro-batch (rows x row length)."""
    precisions: list[GemmPrecision] | None = None
    """None: all that the device supports (BF16 and FP8 on a GPU, FP32 and BF16 on a CPU)."""
    sustained: list[list[int]] = field(default_factory=list)
    """Shapes that are also measured under sustained load."""


@dataclass(slots=True, kw_only=True)
class Copies:
    """Memory copies of one rank, one direction at a time; host-device copies with pinned and with pageable memory."""

    sizes_bytes: list[int]


@dataclass(slots=True, kw_only=True)
class Collectives:
    """Collectives of the first ranks of the job."""

    operations: list[Collective]
    sizes_bytes: list[int]
    """Size of a rank's whole buffer, as in nccl-tests: for all_gather the output, for reduce_scatter the input."""
    ranks: list[int] | None = None
    """Numbers of participating ranks. None: 2, 4, 8, … and all."""


@dataclass(slots=True, kw_only=True)
class Attentions:
    """Causal attention with the heads of the model on a rank of parallel.tp, forward and backward."""

    tokens: int
    """Tokens of one call: rows of seq_lengths[i] tokens with this total."""
    seq_lengths: list[int]
    backends: list[AttentionBackend] | None = None
    """None: all that the device supports."""
    math_max_seq_length: int
    """Maximum row length for `math`, which stores a score for every pair of tokens."""
    batches: list[list[int]] = field(default_factory=list, metadata=OMIT_DEFAULT)
    """Further calls: the number of rows, and the tokens of each row."""


@dataclass(slots=True, kw_only=True)
class Limits:
    """The best known rates of a GPU's kernels and links, each measured separately; None: unknown."""

    gpu: str
    """cluster.gpu.name."""
    source: str
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    attention_forward_tflops: float | None = None
    attention_backward_tflops: float | None = None
    host_to_device_gbs: float | None = None
    device_to_host_gbs: float | None = None
    """With pinned memory, while no other GPU of the node copies."""
    device_gbs: float | None = None
    """Bytes read plus bytes written."""
    peer_gbs: float | None = None
    """One direction."""
    ranks: int | None = None
    """Number of ranks on one node for the bus bandwidths below."""
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
    """Short runs per point; a pause before each GEMM and attention keeps the device cool."""
    point_s: float
    """Time limit of a point in seconds: a slower point has fewer runs, at least three."""
    sustained_s: float
    """Duration of a sustained point, after a quarter of it as warm-up."""
    limits: list[Limits] = field(default_factory=list)
    tolerance: float | None = None
    """How far below its limit the best point of a kernel may be, as a share. None: rates are not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: a kernel with sizes."""

    name: str
    """Unique in the plan: `gemm bf16 4096 x 11008 x 4096`."""
    kernel: str
    """The common name of points with the same limit: `gemm bf16`."""
    family: str
    """gemm, memcpy, collectives or attention."""
    operation: str
    """gemm; a Copy; a Collective; forward or backward."""
    variant: str
    """The precision of a GEMM; pinned or pageable; the dtype of a collective; the backend of attention."""
    sizes: list[int]
    """M, N, K; bytes; bytes; batch, heads, key and value heads, tokens of a row, size of a head."""
    ranks: int
    """Participating ranks. GEMMs, copies and attention are measured by all ranks at the same time, each alone."""
    is_sustained: bool
    work: float
    """Floating-point operations, or bytes, of one call on one rank."""
    unit: str
    """Unit of the rate: TFLOP/s or GB/s, both in powers of ten."""
    peak: float | None
    """Peak rate of the data sheet."""
    limit: float | None
    """The best known rate, with which the best point of this kernel is compared."""
