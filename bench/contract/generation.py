"""What a generation task asks for: prompts, lengths and sampling, and the requests that a plan makes of them."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class Order(Enum):
    """How a replica answers its requests: one after the other, or as many at a time as its batch holds."""

    one_by_one = "one_by_one"
    side_by_side = "side_by_side"


class Batching(Enum):
    """What becomes of a batch whose shortest answer is done.

    static: it goes on until its longest answer is done, and then the next one starts.
    continuous: the next request takes the place at once.
    """

    static = "static"
    continuous = "continuous"


class WeightPrecision(Enum):
    """How the linears' weights lie in memory; nf4 are 4 bits, as QLoRA stores a base. Products are of BF16 numbers with
    bf16, fp8 (E4M3, a scale for each row) and nf4."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    nf4 = "nf4"


@dataclass(slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn; with temperature 0 it is the most probable one."""

    temperature: float = 0.0
    top_k: int | None = None
    """Only from so many most probable tokens. None: from all."""
    top_p: float | None = None
    """Only from the most probable tokens that together have this probability. None: from all."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What is generated. An answer ends at exactly the length asked for, whatever token comes before."""

    question: str
    """The prompt of every answer, where no file of prompts is given."""
    prompts: str | None = None
    """A file of one JSON object a line: {"prompt": "…", "length": 200}; lines without a length take those below."""
    lengths: list[int]
    """New tokens of each answer, in the order in which they are asked for."""
    order: Order
    batching: Batching = Batching.static
    max_batch: int | None = None
    """How many answers one replica works on side by side. None: all of its share."""
    prompt_tokens: int
    """Of a prompt that is drawn at random, with model.weights=random."""
    warmup_tokens: int = 8
    """New tokens of the untimed answers before run_start."""
    sampling: Sampling = field(default_factory=Sampling)
    nf4: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """Store the linears' weights in 4 bits, with precision=bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer that the plan asks a replica for."""

    index: int
    """Its place in the order of the task."""
    replica: int
    prompt: str | None
    """None: so many token ids, drawn at random."""
    prompt_tokens: int
    """Of a random prompt; of a text, the most that its UTF-8 bytes and a first token can come to."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMemory:
    """What the fullest GPU needs while it generates, with all replicas on it, and has; None where there is no GPU."""

    weights_gib: float
    """Of the model as it lies in memory."""
    kv_cache_gib: float
    """Keys and values of all answers that are worked on at one time, at their full length."""
    workspace_gib: float
    total_gib: float
    capacity_gib: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """What the memory bandwidth alone says of one token of one answer, where nothing else takes time: an estimate."""

    bytes_per_token: float
    """Read by each GPU: weights, and keys and values of the prompt and of half of the mean answer."""
    bandwidth_gbs: float
    """Of one GPU, as copies were measured on one."""
    token_s: float
