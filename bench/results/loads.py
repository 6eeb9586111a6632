"""One load of a serving task as its log has it: percentiles, rates, limits, and whether times of tokens mean anything.

A request that failed has no latency, and counts as slower than all others: no percentile leaves it out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.contract.serving import LatencyLimits, Load

OK = "ok"
"""The status of a request that was answered as asked for."""
BUNCHED_SHARE, CHUNKS_PER_TOKEN = 0.1, 0.9
"""From which share of chunks that arrive together with the one before, and below how many chunks a token, the times of
tokens are not the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a log says of one load; times are in seconds, one for each request in the order of arrival."""

    load: Load
    arrival_s: tuple[float, ...]
    latency_s: tuple[float | None, ...]
    """From arrival to the last token; None for a request that failed."""
    ttft_s: tuple[float | None, ...]
    tpot_s: tuple[float | None, ...]
    tokens_out: tuple[int | None, ...]
    status: tuple[str, ...]
    details: tuple[str, ...]
    """What some of the failures said."""
    together: float | None
    """The share of chunks that arrived together with the one before."""
    chunks_per_token: float | None
    client_s: Mapping[str, float]
    """What the client delayed, by name."""
    validity: str
    """VALID or INVALID, by loadgen."""
    reason: str
    """Why it is INVALID."""
    limits: LatencyLimits
    max_client_delay: float
    line: int

    @property
    def num_failed(self) -> int:
        return sum(one != OK for one in self.status)

    @property
    def no_token_times(self) -> str:
        """Why the times of single tokens are not those of the server; empty where they are."""
        if self.load.bunched:
            return "chunks arrive bunched, as this server is known to send them"
        share = self._client_share(self.ttft_s)
        if share is not None and share > self.max_client_delay:
            return f"the client's own delay is {100 * share:.0f} % of the TTFT"
        if self.chunks_per_token is not None and self.chunks_per_token < CHUNKS_PER_TOKEN:
            return f"chunks arrive bunched: {self.chunks_per_token:.2f} chunks a token"
        if self.together is not None and self.together > BUNCHED_SHARE:
            return f"chunks arrive bunched: {100 * self.together:.0f} % with the one before"
        return ""

    @property
    def duration_s(self) -> float | None:
        """From the first arrival to the last token of all."""
        ends = [at + took for at, took in zip(self.arrival_s, self.latency_s, strict=True) if took is not None]
        return max(ends) - self.arrival_s[0] if ends else None

    @property
    def output_throughput(self) -> float | None:
        """Tokens per second of the requests that were answered as asked for."""
        tokens = sum(n or 0 for n, one in zip(self.tokens_out, self.status, strict=True) if one == OK)
        return tokens / self.duration_s if self.duration_s and tokens else None

    @property
    def request_throughput(self) -> float | None:
        done = len(self.status) - self.num_failed
        return done / self.duration_s if self.duration_s and done else None

    @property
    def goodput(self) -> float | None:
        """Requests per second that keep every limit; None without limits, or where one cannot be told."""
        kept = self._keeping()
        return None if kept is None or not self.duration_s else sum(kept) / self.duration_s

    @property
    def keeps_limits(self) -> bool | None:
        """Whether 99 % of all requests keep every limit; None without limits, or where one cannot be told."""
        kept = self._keeping()
        return None if kept is None else sum(kept) >= 0.99 * len(kept)

    def _keeping(self) -> list[bool] | None:
        limits = [
            (self.latency_s, self.limits.latency_s, False),
            (self.ttft_s, self.limits.ttft_s, True),
            (self.tpot_s, self.limits.tpot_s, True),
        ]
        asked = [(values, limit, of_tokens) for values, limit, of_tokens in limits if limit is not None]
        if not asked or (self.no_token_times and any(of_tokens for *_, of_tokens in asked)):
            return None
        return [
            one == OK and all(values[n] is not None and (values[n] or 0) <= limit for values, limit, _ in asked)
            for n, one in enumerate(self.status)
        ]

    def percentile_s(self, values: Sequence[float | None], share: float) -> float | None:
        """Return a percentile over all requests (nearest rank); None where that is a request that failed."""
        sound = (
            math.inf if value is None or one != OK else value for value, one in zip(values, self.status, strict=True)
        )
        found = sorted(sound)[max(0, math.ceil(share / 100 * len(self.status)) - 1)]
        return None if math.isinf(found) else found

    @property
    def client_share(self) -> float | None:
        """The largest share of the latency that is the client's delay: p99 of p99, the mean of the mean."""
        return self._client_share(self.latency_s)

    def _client_share(self, values: Sequence[float | None]) -> float | None:
        answered = [value for value, one in zip(values, self.status, strict=True) if value is not None and one == OK]
        found = []
        for name, delay_s in self.client_s.items():
            whole_s = self.percentile_s(values, 99 if "p99" in name else 50)
            if "mean" in name:
                whole_s = fmean(answered) if answered else None
            found += [delay_s / whole_s] if whole_s else []
        return max(found, default=None)
