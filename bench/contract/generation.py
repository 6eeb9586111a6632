"""Settings of a generation task (prompts, lengths, sampling), and the requests in its plan."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class Order(Enum):
    """Whether a replica runs its requests one at a time, or in batches."""

    one_by_one = "one_by_one"
    side_by_side = "side_by_side"


class Batching(Enum):
    """How a batch is refilled.

    static: the next batch starts when the longest answer of this batch is done.
    continuous: a waiting request replaces a finished one at once.
    """

    static = "static"
    continuous = "continuous"


class WeightPrecision(Enum):
    """The format of the linears' weights in memory; nf4 has 4 bits, as in QLoRA. GEMMs compute in BF16 with bf16, fp8
    (E4M3, one scale per row) and nf4."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    nf4 = "nf4"


@dataclass(slots=True, kw_only=True)
class Sampling:
    """How the next token is sampled; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    """Sample only from the k most probable tokens. None: from all."""
    top_p: float | None = None
    """Sample only from the most probable tokens with this total probability. None: from all."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What is generated. Every answer has exactly the requested length; end-of-sequence tokens are ignored."""

    question: str
    """The prompt of every request, if no file of prompts is given."""
    prompts: str | None = None
    """A file with one JSON object per line: {"prompt": "…", "length": 200}; lines without a length use `lengths`."""
    lengths: list[int]
    """New tokens of each answer, in the order of the requests."""
    order: Order
    batching: Batching = Batching.static
    max_batch: int | None = None
    """Maximum number of concurrent requests of a replica. None: all of its share."""
    prompt_tokens: int
    """Tokens of a random prompt, with model.weights=random."""
    warmup_tokens: int = 8
    """New tokens of the warm-up answers before run_start, which are not timed."""
    sampling: Sampling = field(default_factory=Sampling)
    nf4: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """Store the linears' weights in 4 bits, with precision=bf16."""
    peer_memory: bool = field(default=True, metadata=OMIT_DEFAULT)
    """With TP on GPUs: add few rows through the memory of the other GPUs, if they can access it; false: with NCCL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, assigned to a replica."""

    index: int
    """Its position in the order of the task."""
    replica: int
    prompt: str | None
    """None: random token ids."""
    prompt_tokens: int
    """Length of a random prompt; for a text an upper bound: its UTF-8 bytes plus the first token."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMemory:
    """Estimated memory of the fullest GPU, with all replicas on it, and its capacity; None without a GPU."""

    weights_gib: float
    """The model in its memory format."""
    kv_cache_gib: float
    """KV cache of all concurrent requests at full length."""
    workspace_gib: float
    total_gib: float
    capacity_gib: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Estimated time of one token of one request from memory bandwidth alone."""

    bytes_per_token: float
    """Read by each GPU: weights, and the KV cache of the prompt and half of the average answer."""
    bandwidth_gbs: float
    """Of one GPU, from measured copies."""
    token_s: float
