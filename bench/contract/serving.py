"""Settings of a serving task: the server, its loads, and the latency limits."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.contract.codec import OMIT_DEFAULT


class ServerName(Enum):
    """A server with the OpenAI API."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    tgi = "tgi"
    lightllm = "lightllm"
    tensorrt_llm = "tensorrt_llm"


class Arrivals(Enum):
    """When requests arrive: all at once, as a Poisson process, or each after an answer to an earlier one."""

    burst = "burst"
    poisson = "poisson"
    one_by_one = "one_by_one"
    concurrent = "concurrent"
    """A fixed number of requests is always in flight: the client sends the next one after an answer."""

    @property
    def scenario(self) -> str:
        """The scenario of MLPerf's loadgen."""
        return {"poisson": "Server", "one_by_one": "SingleStream"}.get(self.name, "Offline")


@dataclass(slots=True, kw_only=True)
class ServerProfile:
    """How the GPU time of a server is profiled, for launch.profile=modules.

    Without endpoints, the server's Python processes record themselves under torch.profiler.
    """

    has_endpoints: bool = False
    """The server has POST /start_profile and POST /stop_profile."""
    options: list[str] = field(default_factory=list)
    """Arguments added to the command line; {profile} is the folder of the traces."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables added for the profile, with {profile} as above."""


@dataclass(slots=True, kw_only=True)
class Server:
    """A server and its command line; parallel.tp and precision apply to the server."""

    name: ServerName
    source: str
    """Source of the image and of the command line."""
    argv: list[str]
    """The command line, with the placeholders {python} (the interpreter of the ranks), {model}, {host}, {port}, {tp},
    {device}, {total} (tokens of the longest request), {requests} and {memory_fraction}."""
    precisions: dict[str, list[str]]
    """Arguments added to argv per precision; precisions that are not listed are not supported."""
    cpu_options: list[str] = field(default_factory=list)
    """Arguments added to argv on CPUs, where a server would use the memory of the whole machine."""
    options: list[str] = field(default_factory=list)
    """Arguments added at the end of argv."""
    request: dict[str, Any] = field(default_factory=dict)
    """Additional fields of each request, such as ignore_eos."""
    removes_eos: bool = False
    """Serve a copy of the model folder (of symbolic links) without an EOS token, for servers without ignore_eos."""
    image: str | None = None
    """The image of the ranks and the server, if container sets a runtime but no image."""
    batches_tokens: bool = False
    """The server is known to send several tokens together, so no time per token is reported."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the server only."""
    memory_fraction: float = field(default=1.0, metadata=OMIT_DEFAULT)
    """Share of the memory of a GPU that the server uses for weights, KV cache and temporary tensors."""
    profile: ServerProfile | None = field(default=None, metadata=OMIT_DEFAULT)
    """None: the server cannot be profiled."""
    health: str = "/health"
    """The path that returns 200 when the server is ready."""
    port: int | None = None
    """None: a free one."""
    startup_timeout_s: float = 600
    """How long to wait until `health` returns 200."""
    model: str | None = None
    """A folder in Hugging Face format. None: cluster.paths.model, or with model.weights=random a generated one.
    With url: the model's name on that server."""
    url: str | None = None
    """URL of a running server, such as http://node7:8000; no server is started."""
    tokenizer: str | None = None
    """The folder of tokenizer.json, if it is not the model folder."""


@dataclass(slots=True, kw_only=True)
class LatencyLimits:
    """Latency limits of a good request, in seconds; None: no limit."""

    ttft_s: float | None = None
    """Time to the first token."""
    tpot_s: float | None = None
    """Time per output token after the first."""
    latency_s: float | None = None
    """From arrival to the last token. Loadgen compares it with the 99th percentile of a Poisson load."""


@dataclass(slots=True, kw_only=True)
class LogNormal:
    """A lognormal distribution of a number of tokens. A number outside the limits becomes the nearest limit.

    All fields or none must be set.
    """

    mean: float | None = None
    """The mean in tokens, before the limits apply."""
    sigma: float | None = None
    """The standard deviation of the logarithm of the number."""
    min: int | None = None
    max: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether any of its fields is set."""
        return self != LogNormal()


@dataclass(slots=True, kw_only=True)
class Lengths:
    """Where the lengths of each request come from: a file, or two distributions; tokens_in and tokens_out if none."""

    file: str | None = None
    """A file of pairs: .jsonl with {"prompt_tokens": 512, "answer_tokens": 64}, or .csv with these columns."""
    prompt: LogNormal = field(default_factory=LogNormal)
    answer: LogNormal = field(default_factory=LogNormal)

    @property
    def vary(self) -> bool:
        """Whether each request has its own lengths."""
        return self != Lengths()


@dataclass(slots=True, kw_only=True)
class Serving:
    """A server and its loads."""

    server: Server
    arrivals: list[Arrivals]
    """The loads, in order; poisson has one load per rate, concurrent one per concurrency."""
    rates: list[float]
    """Requests per second of Poisson loads, ascending. Use several to find the saturation point."""
    concurrency: list[int] = field(default_factory=list, metadata=OMIT_DEFAULT)
    """Requests in flight of concurrent loads, ascending; one load each."""
    requests: int
    """Requests per load."""
    tokens_in: int
    """Tokens of each prompt, exactly, by the server's tokenizer. Not used if `lengths` is set."""
    tokens_out: int
    """Tokens of each answer, exactly. Not used if `lengths` is set."""
    lengths: Lengths = field(default_factory=Lengths, metadata=OMIT_DEFAULT)
    """Lengths that differ from request to request, sampled by the seed of the trial."""
    warm_up: int
    """Concurrent warm-up requests before run_start, which are not timed."""
    limits: LatencyLimits
    request_timeout_s: float
    max_client_delay: float
    """Maximum client overhead, as a share of the median latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of the plan."""

    name: str
    """For example: burst, poisson 2/s, one by one, concurrency 8."""
    arrivals: Arrivals
    requests: int
    rate: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """Requests per second of a Poisson load."""
    concurrency: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Requests in flight of a concurrent load."""
    batched_tokens: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """True if the server is known to send several tokens together."""

    @property
    def label(self) -> str:
        """The name for use in file names."""
        return self.name.replace(" ", "_").replace("/s", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLengths:
    """The tokens of the requests of a trial: request n of every load has the n-th numbers."""

    tokens_in: list[int]
    tokens_out: list[int]

    def pair(self, number: int) -> tuple[int, int]:
        """Return the tokens of a prompt and its answer, from 0; a longer warm-up begins again after the last ones."""
        at = number % len(self.tokens_in)
        return self.tokens_in[at], self.tokens_out[at]

    @property
    def totals(self) -> list[int]:
        return [sum(pair) for pair in zip(self.tokens_in, self.tokens_out, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLengths:
    """The sampled lengths of all trials."""

    sha256: str | None
    """Of the file of pairs; None without a file."""
    trials: list[RequestLengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Estimated memory of one GPU of the server; None where the GPU is unknown.

    A server queues the requests that do not fit, so a load fits if the longest request fits.
    """

    weights_gib: float
    workspace_gib: float
    """CUDA's own memory, and temporary tensors of the longest prompt; a server that batches prompts needs more."""
    request_gib: float
    """The KV cache of the longest request at its full length."""
    concurrent: int
    """The most requests that the loads have at the same time."""
    kv_cache_gib: float
    """The KV cache of the concurrent requests that fit at the same time; of all of them if the GPU is unknown."""
    total_gib: float
    """Weights, workspace and this KV cache."""
    capacity_gib: float | None
    fraction: float
    """The share of the capacity that the server uses."""
    fitting: int | None
    """How many of the concurrent requests fit at the same time; of the longest ones if lengths differ."""
    longest_gib: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """The KV cache of as many of the longest requests as are concurrent. None: all requests have the same length."""

    @property
    def all_gib(self) -> float:
        """The most KV cache that the concurrent requests need together."""
        return self.concurrent * self.request_gib if self.longest_gib is None else self.longest_gib

    @property
    def fits(self) -> bool | None:
        return None if self.fitting is None else self.fitting > 0


def command(server: Server, *, precision: str, is_cpu: bool, is_profiled: bool = False) -> list[str]:
    """Return the command line of a server, with placeholders."""
    of_device = server.cpu_options if is_cpu else []
    of_profile = server.profile.options if is_profiled and server.profile else []
    return [*server.argv, *server.precisions[precision], *of_device, *of_profile, *server.options]


def lengths_of(serving: Serving, lengths: SampledLengths | None, trial: int) -> RequestLengths:
    """Return the lengths of the requests of a trial."""
    if lengths is not None:
        return lengths.trials[trial]
    same = serving.requests
    return RequestLengths(tokens_in=[serving.tokens_in] * same, tokens_out=[serving.tokens_out] * same)


def total_tokens(serving: Serving, lengths: SampledLengths | None) -> int:
    """Return the tokens of the longest prompt with its answer."""
    if lengths is None:
        return serving.tokens_in + serving.tokens_out
    return max(max(trial.totals) for trial in lengths.trials)
