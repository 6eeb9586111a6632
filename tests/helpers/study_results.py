"""Studies as their folders would be read, written by hand: what the documents and the page are compared with."""

from collections.abc import Mapping
from pathlib import Path

from bench.results.comparison import compare
from bench.results.study import Cell, Column, Difference, Mark, Publication, Published, Row, StudyResult, Table

HARDWARE = "1 × NVIDIA H200"
RATE = Column(measurement="throughput_per_gpu", title="throughput", unit="tokens/s/GPU", higher_is_better=True)
STEP = Column(measurement="step_time", title="step time", unit="ms", higher_is_better=False)
PAPER = Publication(
    name="paper_table_3",
    title="Dissecting the runtime",
    place="table 3, page 7",
    hardware="8 × A800-80GB",
    date="2023-11-07",
)
_BF16, _FP8 = (17_310.0, 17_342.0, 17_298.0, 17_355.0), (23_401.0, 23_466.0, 23_380.0, 23_433.0)


def measured(arm: str, values: tuple[float, ...], mean: float, deviation: float) -> Cell:
    """Return a cell of valid runs; mean and deviation are worked out by hand."""
    runs = tuple(f"{arm}.{block}" for block in range(1, len(values) + 1))
    return Cell(mark=Mark.measured, value=mean, deviation=deviation, values=values, runs=runs)


def precisions(folder: Path, **changes: object) -> StudyResult:
    """Return two arms in four blocks, one of them calculated, another not advisable, a third not there."""
    rows = (
        _row("bf16", {"precision": "BF16"}, measured("bf16", _BF16, 17_326.25, 26.7005)),
        _row("fp8", {"precision": "FP8"}, measured("fp8", _FP8, 23_420.0, 37.6918)),
        _row("fp32", {"precision": "FP32"}, _calculated()),
        _row("int8", {"precision": "INT8"}, Cell(mark=Mark.not_advisable, reason="training in INT8 does not converge")),
        _row(
            "transformers", {"precision": "BF16"}, Cell(mark=Mark.no_result, reason="engine huggingface does not exist")
        ),
    )
    values: dict[str, object] = {
        "name": "precisions",
        "title": "BF16 against FP8, 8B LoRA",
        "question": "How much faster is FP8?",
        "source": "ours",
        "folder": str(folder),
        "columns": (RATE, STEP),
        "rows": rows,
        "tables": (),
        "differences": (
            _difference(),
            Difference(
                first="bf16",
                second="transformers",
                measurement="step_time",
                comparison=None,
                reason="transformers has no result",
            ),
        ),
        "publications": (PAPER,),
        "cluster": "h200",
        "command": "runstop study precisions cluster=h200",
        "commit": "0123abcd",
        "date": "2026-11-22",
        "hardware": HARDWARE,
        "order": (("bf16", "fp8"), ("fp8", "bf16")),
        "margin": 0.02,
        "notes": ("over steps 31 to 130",),
    }
    return StudyResult(**values | changes)  # type: ignore[arg-type]


def _row(arm: str, labels: Mapping[str, str], rate: Cell) -> Row:
    published = {
        "bf16": (Published(publication="paper_table_3", value=64_043.5, printed="640435", reason="a digit too many"),),
        "int8": (Published(publication="paper_table_3", value=None, printed="-"),),
    }
    step = (
        measured(arm, (236.4, 236.1, 236.7, 236.4), 236.4, 0.244949)
        if rate.n == 4
        else Cell(mark=Mark.measured, value=448.9, values=(448.9,), runs=(f"{arm}.1",))
    )
    if rate.mark in (Mark.not_advisable, Mark.no_result):
        step = Cell(mark=rate.mark, reason=rate.reason)
    facts = {} if rate.value is None else {"GPU": "NVIDIA H200", "driver": "570.86" if arm == "fp8" else "570.80"}
    return Row(
        arm=arm,
        labels=labels,
        cells={"throughput_per_gpu": rate, "step_time": step},
        published={"throughput_per_gpu": published[arm]} if arm in published else {},
        facts=facts,
    )


def _calculated() -> Cell:
    reason = "20 of 1,000 steps ran; the rest is taken to be as fast"
    return Cell(mark=Mark.calculated, value=9_120.5, values=(9_120.5,), runs=("fp32.1",), reason=reason)


def _difference() -> Difference:
    compared = compare(
        _FP8, _BF16, names=("fp8", "bf16"), measurement="throughput_per_gpu", unit="tokens/s/GPU", higher_is_better=True
    )
    return Difference(first="fp8", second="bf16", measurement="throughput_per_gpu", comparison=compared)


def scaling(folder: Path) -> StudyResult:
    """Return two methods on one, two and four GPUs, as a table of labels, with published figures."""
    rates = {
        ("Naive", "1"): (100.0, 101.0, 99.0),
        ("Naive", "2"): (190.0, 192.0, 191.0),
        ("Naive", "4"): (350.0, 348.0, 355.0),
        ("Z3", "1"): (80.0, 80.5, 81.0),
        ("Z3", "2"): (160.0, 158.0, 161.0),
    }
    means = {("Naive", "1"): (100.0, 1.0), ("Naive", "2"): (191.0, 1.0), ("Naive", "4"): (351.0, 3.60555)}
    means |= {("Z3", "1"): (80.5, 0.5), ("Z3", "2"): (159.667, 1.52753)}
    cells = {key: measured(" ".join(key), values, *means[key]) for key, values in rates.items()}
    cells["Z3", "4"] = Cell(mark=Mark.no_result, reason="the plan needs 161 GiB of the 139.8 GiB of a GPU")
    figures = {("Naive", "1"): 60.0, ("Naive", "2"): 118.0, ("Naive", "4"): 230.0}
    rows = tuple(
        Row(
            arm=" ".join(key),
            labels={"method": key[0], "GPUs": key[1]},
            cells={"throughput": cell},
            published={
                "throughput": (Published(publication="paper_table_3", value=figures[key], printed=str(figures[key])),)
            }
            if key in figures
            else {},
        )
        for key, cell in cells.items()
    )
    column = Column(measurement="throughput", title="throughput", unit="samples/s", higher_is_better=True)
    table = Table(
        title="Scaling",
        column=column,
        row_labels=("method",),
        column_labels=("GPUs",),
        columns=(("1",), ("2",), ("4",)),
        rows=tuple(((name,), tuple(f"{name} {count}" for count in "124")) for name in ("Naive", "Z3")),
    )
    return precisions(
        folder, title="From one GPU to four", columns=(column,), rows=rows, tables=(table,), differences=()
    )
