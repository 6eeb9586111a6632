"""What a serving task measures: somebody's server, the loads that it gets, and the limits its answers should keep."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.contract.codec import OMIT_DEFAULT


class ServerName(Enum):
    """A server of the OpenAI API."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    tgi = "tgi"
    lightllm = "lightllm"
    tensorrt_llm = "tensorrt_llm"


class Arrivals(Enum):
    """When requests arrive: all at once, as a Poisson process at a rate, or each when the one before is answered."""

    burst = "burst"
    poisson = "poisson"
    one_by_one = "one_by_one"

    @property
    def scenario(self) -> str:
        """Return what MLPerf's loadgen calls it."""
        return {"burst": "Offline", "poisson": "Server", "one_by_one": "SingleStream"}[self.name]


@dataclass(slots=True, kw_only=True)
class Server:
    """A server, and how it is started; parallel.tp is its tensor parallelism, and precision its precision."""

    name: ServerName
    source: str
    """Of the image and of the command line."""
    argv: list[str]
    """Starts it. {python}, {model}, {host}, {port}, {tp}, {device} and {total} (tokens of the longest request) are
    filled in; {python} is the interpreter of the ranks."""
    precisions: dict[str, list[str]]
    """What is added to argv for each precision; one that is missing cannot be asked for."""
    cpu_options: list[str] = field(default_factory=list)
    """Added to argv on CPUs, where a server would take the memory of the whole machine."""
    options: list[str] = field(default_factory=list)
    """Added to argv at its end."""
    request: dict[str, Any] = field(default_factory=dict)
    """More fields of each request, such as ignore_eos."""
    removes_eos: bool = False
    """Let it load a copy of the model's folder (of links) that names no token at which answers end: for servers that
    know no ignore_eos."""
    image: str | None = None
    """What the ranks, and the server as their child, run in where container names a runtime and no image."""
    bunches_chunks: bool = False
    """It is known to send tokens together: no time of a single token is stated, whatever one run happens to show."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set for the server alone."""
    health: str = "/health"
    """The path that answers 200 once the server is ready."""
    port: int | None = None
    """None: a free one."""
    healthy_within_s: float = 600
    model: str | None = None
    """A folder of Hugging Face's format. None: cluster.paths.model, or with model.weights=random one made on the spot.
    With url: what that server calls its model."""
    url: str | None = None
    """Of a server that runs elsewhere, such as http://node7:8000; nothing is started then."""
    tokenizer: str | None = None
    """The folder of tokenizer.json, where it is not that of the model."""


@dataclass(slots=True, kw_only=True)
class LatencyLimits:
    """What a request must keep to count as good, in seconds; None: no limit."""

    ttft_s: float | None = None
    """Time to the first token."""
    tpot_s: float | None = None
    """Time per output token after the first."""
    latency_s: float | None = None
    """From arrival to the last token. Loadgen holds the 99th percentile of a Poisson load against it."""


@dataclass(slots=True, kw_only=True)
class Serving:
    """Which server gets which loads."""

    server: Server
    arrivals: list[Arrivals]
    """One load after the other; of poisson one for each rate."""
    rates: list[float]
    """Requests per second of Poisson loads, in rising order. Several find the knee."""
    requests: int
    """Of each load."""
    tokens_in: int
    """Of each prompt, exactly, by the server's own tokenizer."""
    tokens_out: int
    """Of each answer, exactly."""
    warm_up: int
    """Requests at one time before the clock starts."""
    limits: LatencyLimits
    request_timeout_s: float
    max_client_delay: float
    """The largest share of a median latency that the client's own delay may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of the plan."""

    name: str
    """burst, poisson 2/s, one by one."""
    arrivals: Arrivals
    requests: int
    rate: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """Requests per second, of a Poisson load."""
    bunched: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """True where the server is known to send tokens together."""

    @property
    def label(self) -> str:
        """The name as part of a file's."""
        return self.name.replace(" ", "_").replace("/s", "")


def command(server: Server, *, precision: str, is_cpu: bool) -> list[str]:
    """Return what starts a server, with the words that something is filled in for."""
    return [*server.argv, *server.precisions[precision], *(server.cpu_options if is_cpu else ()), *server.options]


def total_tokens(serving: Serving) -> int:
    """Return the tokens of a request and its answer."""
    return serving.tokens_in + serving.tokens_out
