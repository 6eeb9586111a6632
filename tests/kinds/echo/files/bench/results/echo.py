"""What a trial of an echo task shows, from its log alone."""

from dataclasses import dataclass

from bench.contract.echo_plan import EchoPlan
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import required
from bench.mlperf.log import Log
from bench.mlperf.result import Result, differing
from bench.results.measurement import Measurement

WORDS, ECHO = "echo_words", "echo"
"""The keys of the log: the words that are echoed, and one text with the time that it took."""
UNITS = {"word_rate": "words/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoResult:
    """The words that were to be echoed, and those that were."""

    result: Result
    wanted: tuple[str, ...]
    echoed: tuple[str, ...]
    total_s: float

    @property
    def problems(self) -> list[str]:
        return [f"{text} was not echoed" for text in self.wanted if text not in self.echoed]

    @property
    def valid(self) -> bool:
        return self.result.valid and bool(self.echoed) and not self.problems

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        if not self.valid:
            return ()
        return (Measurement(name="word_rate", unit="words/s", value=len(self.echoed) / self.total_s),)

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        words = (list(self.wanted), required(plan, EchoPlan).words)
        return differing({"words": words, "seed": (self.result.seed, trial.seed)})


def read(log: Log, result: Result) -> EchoResult:
    """Return what the log of such a task says."""
    wanted, echoed = log.single(WORDS), log.all(ECHO)
    assert wanted is not None
    return EchoResult(
        result=result,
        wanted=tuple(wanted.value),
        echoed=tuple(str(event.value) for event in echoed),
        total_s=sum(float(event.metadata["seconds"]) for event in echoed),
    )
