"""Predict every published row, and compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.prediction import published, step
from bench.prediction.network import links
from bench.prediction.published import Measured, Row
from bench.prediction.stacks import MEGATRON, REFERENCE, Stack
from bench.prediction.step import Layout, Terms, Work

A100_PER_NODE = 8
"""GPUs of a node in the tables of vTrain and Selene."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """A published row with its prediction."""

    row: Row
    terms: Terms | None
    why_not: str = ""
    """Why there is no prediction, or nothing to compare it with."""
    sets: tuple[str, ...] = ()
    """The constants that this row set."""

    @property
    def error(self) -> float | None:
        """Predicted / published - 1."""
        if self.terms is None or self.row.step_s is None:
            return None
        return self.terms.step_s / self.row.step_s - 1


def work(gpu: str, benchmark: str, *, gpus_per_node: int, stack: Stack = REFERENCE, is_fp4: bool = False) -> Work:
    """Return what a benchmark trains on a GPU."""
    of_fp4 = published.fp4(gpu) if is_fp4 else None
    return Work(
        model=published.model(published.MODELS[benchmark]),
        rates=published.rates(gpu),
        gpu=gpu,
        links=links(published.network(gpu), gpus_per_node, published.smaller_groups(gpu)),
        stack=stack,
        gemm_start_s=(of_fp4.gemm_start_us if of_fp4 else published.gemm_start_us(gpu)) / 1e6,
        fp4_tflops=of_fp4.tflops if of_fp4 else None,
        adapter_weights=published.ADAPTER_WEIGHTS.get(benchmark, 0),
    )


def grade(row: Row, stack: Stack = REFERENCE) -> Graded:
    """Return a row with its prediction."""
    if row.layout is None:
        return Graded(row=row, terms=None, why_not="other software, or no layout")
    if row.gpu not in published.PREDICTED_GPUS or (row.precision == "fp4" and published.fp4(row.gpu) is None):
        missing = row.gpu if row.gpu not in published.PREDICTED_GPUS else row.precision.upper()
        return Graded(row=row, terms=None, why_not=f"no rates of {missing}")
    terms = predicted(row, row.layout, stack)
    why_not = "" if row.step_s is not None else "no step time in the log"
    return Graded(
        row=row,
        terms=terms,
        why_not=why_not,
        sets=tuple(name for name, one in stack.constants().items() if one.row == row.name),
    )


def predicted(row: Row, layout: Layout, stack: Stack = REFERENCE) -> Terms:
    of_row = work(row.gpu, row.benchmark, gpus_per_node=row.gpus_per_node, stack=stack, is_fp4=row.precision == "fp4")
    return step.predict(of_row, layout)


def graded(stack: Stack = REFERENCE) -> list[Graded]:
    """Return all rows, in the order of the table."""
    return [grade(row, stack) for row in published.rows()]


def error_on_a100(row: Measured) -> float:
    """Return predicted / measured - 1 of a step of Megatron on A100."""
    fabric = links(published.network("a100"), A100_PER_NODE)
    on_a100 = Work(
        model=row.model, rates=published.rates("a100"), gpu="a100", links=fabric, stack=MEGATRON, is_fp8=False
    )
    return step.predict(on_a100, row.layout).step_s / row.step_s - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of a set of rows, without signs."""

    num_rows: int
    median: float
    maximum: float


def summary(rows: list[Graded]) -> Summary | None:
    """Return the summary of the rows with an error that set no constant; None if there are none."""
    return summary_of([each.error for each in rows if each.error is not None and not each.sets])


def summary_of(errors: Sequence[float]) -> Summary | None:
    """Return the summary of errors with signs; None if there are none."""
    sizes = [abs(error) for error in errors]
    return Summary(len(sizes), median(sizes), max(sizes)) if sizes else None
