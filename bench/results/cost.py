"""What a trial cost: the GPU hours of its measured times, at the logged price of a GPU hour.

Without a price in the log there is no cost. The costs are those of the shown times: of run_start to run_stop, of the
steps of an epoch, and of a million tokens at the measured throughput. Start-up and idle GPUs are not included.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.contract import mllog
from bench.mlperf.log import number
from bench.mlperf.result import Result
from bench.results.measurement import Measurement

RUN, EPOCH, TOKENS = "run_cost", "epoch_cost", "cost_per_million_tokens"
NAMES = (RUN, EPOCH, TOKENS)
"""The names of the measurements; their unit is the currency."""
_HOURS = {"s": 1 / 3600, "min": 1 / 60}
_OF_RUN = ("time_to_train", "run_time", "generation_time")
_RATES = ("throughput_per_gpu", "output_throughput")
"""Tokens/s of a GPU, and of all GPUs of a server under a load, whose name may be before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a GPU hour."""

    per_gpu_hour: float
    currency: str


def price(result: Result) -> Price | None:
    """Return the price in a log; None if it has none."""
    logged = result.hyperparameters
    per_gpu_hour, currency = number(logged.get(mllog.PRICE_PER_GPU_HOUR)), logged.get(mllog.CURRENCY)
    if per_gpu_hour is None or per_gpu_hour <= 0 or not isinstance(currency, str):
        return None
    return Price(per_gpu_hour=per_gpu_hour, currency=currency)


def of_measured(measured: Iterable[Measurement], result: Result) -> Iterator[Measurement]:
    """Yield the costs that follow from these measurements; none without a price or without GPUs."""
    known = price(result)
    if known is None or not result.num_gpus:
        return
    per_hour = known.per_gpu_hour * result.num_gpus
    for one in measured:
        name, value = one.name, one.value
        prefix, _, last = name.rpartition(" ")
        if name in _OF_RUN:
            yield Measurement(name=RUN, unit=known.currency, value=value * _HOURS[one.unit] * per_hour)
        elif name == "epoch_time":
            yield Measurement(name=EPOCH, unit=known.currency, value=value * _HOURS[one.unit] * per_hour, n=one.n)
        elif last in _RATES and value > 0:
            of_all = value * result.num_gpus if last == "throughput_per_gpu" else value
            cost = 1e6 / of_all / 3600 * per_hour
            yield Measurement(name=f"{prefix} {TOKENS}".strip(), unit=known.currency, value=cost, n=one.n)


def with_costs(measured: Iterable[Measurement], result: Result) -> tuple[Measurement, ...]:
    """Return measurements followed by the costs that follow from them."""
    listed = tuple(measured)
    return (*listed, *of_measured(listed, result))
