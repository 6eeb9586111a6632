"""The tables of results that no short run has, and tables on terminals: golden_sheets.txt, so that a change shows.

After a change on purpose, run it once with WRITE_SHEETS=1, and read the difference.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.console import calibration, diagnosis, fetch, goodput, images, published, result, scaling, sheet, study
from bench.contract.cluster import Gpu, Rates
from bench.diagnosis import Explanation
from bench.diagnosis.log_scan import Clue
from bench.fetch import download, hub, record
from bench.images import importer, store
from bench.mlperf import results_repository
from bench.mlperf.official import Verdict
from bench.mlperf.package import Package, Request, checkers
from bench.mlperf.package import entry as package_entries
from bench.mlperf.score import Score, score
from bench.prediction.scale import Point, PublishedSpeed, Range, Scaling, StackName
from bench.prediction.uncertainty import Interval
from bench.report import serving, tuning
from bench.report.tables import TextTable
from bench.results.imported import Summary
from bench.results.reference import ReferenceResult, ReferenceVerdict
from bench.results.statement import Bounds, PublishedRatios, StatedInterval, StatementResult, StatementVerdict
from bench.results.study import Cell, Mark, PlannedArm
from bench.results.tuning import Candidate, Outcome, Tried, Tuning
from bench.rules.check import Checked
from bench.rules.finding import broken
from bench.rules.signs import Weight
from bench.runs import ledger
from bench.runs.goodput import Goodput, Part, TrialTime
from bench.runs.verification import Compared, Verification
from helpers import golden, planned_log, study_results, user_tables
from helpers.screen import terminal

GOLDEN = Path(__file__).with_name("golden_sheets.txt")


def checks() -> Iterator[TextTable]:
    passed = Checked("paths", ("CFG-06",), "laptop", seen="4 paths")
    unknown = Checked("time limit", ("SLU-02", "SLU-01"), "laptop", unknown="sinfo does not answer")
    warning = broken("CFG-03", "evaluations are rare", "recipe", severity="warning", fix="evaluate more")
    wrong = Checked("schedule", ("CFG-03",), "laptop", (broken("CFG-03", "no evaluation", "recipe"), warning))
    without_rules = Checked("clocks", (), "nodes", seen="2 nodes")
    for checked in ([passed], [unknown], [passed, unknown], [passed, wrong, unknown], [without_rules, passed, wrong]):
        yield from diagnosis.check_sheets(checked)
    also = (Clue("NCC-01", Weight.ECHO, "rank_1.out", 7, "timeout"), Clue("RUN-02", Weight.END, "job.out", 9, "killed"))
    why = Explanation(
        run="runs/a",
        rule="RUN-01",
        title="a GPU ran out of memory",
        evidence="CUDA out of memory",
        file="rank_0.out",
        line=12,
        detail="step 100 of 800",
        fix="lower recipe.micro_batch_size",
        also=also,
        lines=("first", "second"),
    )
    yield diagnosis.explanation_sheet(why)
    yield diagnosis.explanation_sheet(replace(why, rule=None, file=None, detail=None, fix=None, also=(), lines=()))
    yield diagnosis.explanation_sheet(Explanation(run="runs/b", rule="unknown", title="no known problem"))
    compared = (
        Compared(what="plan.json", expected="ab" * 32, actual="cd" * 32, passed=False, rule="LOG-18"),
        Compared(what="facts/rank_0.json", expected="", actual="", passed=True),
        Compared(what="facts/rank_1.json", expected="", actual="", passed=True),
        Compared(what="other/one", expected="", actual="", passed=True),
        Compared(what="images/", expected="a", actual="a", passed=True),
        Compared(what="ledger.json", expected="1", actual="2", passed=False),
        Compared(what="result_0.txt", expected="3", actual="4", passed=False, rule="LOG-18"),
        Compared(what="written", expected="", actual=f"by commit {'12' * 20}", passed=None),
    )
    yield diagnosis.verification_sheet(Verification(folder="runs/a", compared=compared))
    yield diagnosis.verification_sheet(Verification(folder="runs/b", compared=compared[1:4]))
    yield from map(diagnosis.rule_sheet, diagnosis.named_rules(["pyx-5", "SCO7", "ENR"]))


def studies(folder: Path) -> Iterator[TextTable]:
    precisions, table = study_results.precisions(folder), study_results.scaling(folder)
    yield from study.sheets(precisions)
    yield from study.sheets(table)
    references = tuple(
        ReferenceResult(
            arm="bf16",
            measurement="throughput_per_gpu",
            unit="tokens/s/GPU",
            reference=17_000.0,
            tolerance=0.02,
            verdict=verdict,
            value=17_326.25,
            n=4,
            change=0.01919,
            platform=platform,
        )
        for verdict, platform in zip(ReferenceVerdict, ("", "h200", "", "h100"), strict=False)
    )
    interval = StatedInterval(name="fp8 / bf16", n=4, value=1.3517, low=1.3477, high=1.3557)
    statements = (
        StatementResult(
            text="FP8 is faster",
            source="ours",
            measurement="throughput_per_gpu",
            bounds=Bounds(at_least=1.2),
            verdict=next(iter(StatementVerdict)),
            reason="all pairs",
            intervals=(interval,),
            deciding=0,
            published=(PublishedRatios(publication="paper_table_3", n=2, low=1.1, high=1.3, within=False),),
        ),
        StatementResult(
            text="it fits",
            source="ours",
            measurement="",
            bounds=Bounds(at_most=0.9),
            verdict=list(StatementVerdict)[-1],
            reason="no runs",
            platform="h200",
        ),
    )
    interval_cell = Cell(mark=Mark.measured, value=17_326.25, values=(1.0, 2.0), low=17_300.5, high=17_351.9)
    coefficient = Cell(mark=Mark.estimated, value=1.2, values=(1.2,), text="1.20 (1.10 to 1.31)", low=1.1, high=1.31)
    rows = list(precisions.rows)
    for place, cell in ((0, interval_cell), (2, coefficient)):
        rows[place] = replace(rows[place], cells=dict(rows[place].cells) | {"step_time": cell})
    everything = {"references": references, "statements": statements, "rows": tuple(rows), "publications": ()}
    yield from study.sheets(
        study_results.precisions(folder, **everything, hardware="", commit="", command="", notes=())
    )
    single = [replace(row, cells={key: _single(cell) for key, cell in row.cells.items()}) for row in precisions.rows]
    yield from study.sheets(study_results.precisions(folder, rows=tuple(single), differences=(), order=()))
    arm = PlannedArm(
        name="a",
        layout="dp 8",
        num_ranks=8,
        micro_batch_size=2,
        global_batch_size=16,
        step_time_ms=1234.5,
        steps=2000,
        memory_gib=70.52,
        capacity_gib=79.6,
        walltime_min=90,
        backend="slurm",
        before_launch=("DATADIR is not set",),
        price_per_gpu_hour=2.5,
        currency="EUR",
        note="a note",
    )
    arms = (
        arm,
        replace(arm, name="b", model="llama2_7b", changed=("recipe.lr=1", "trials=2"), capacity_gib=None),
        replace(arm, name="c", step_time_ms=None, note="", price_per_gpu_hour=None, currency="", backend="local"),
        PlannedArm(name="d", runs=False, mark=Mark.not_advisable, reason="it does not converge"),
    )
    blocks = [("a", "b", "c"), ("b",), ()]
    yield study.plan_sheet("mine", arms, blocks)
    yield study.plan_sheet("mine", arms, [(), ()])
    yield study.plan_sheet("mine", [*arms[:2], replace(arm, name="e", currency="USD")], [("a", "e")])
    yield study.plan_sheet("mine", arms[3:], [()])
    yield study.plan_sheet("mine", arms[2:3], [("c",)])


def _single(cell: Cell) -> Cell:
    """Return a cell of one run."""
    return replace(cell, deviation=None, values=cell.values[:1], runs=cell.runs[:1], reason="")


def predictions() -> Iterator[TextTable]:
    first = Point(
        num_nodes=1,
        num_gpus=8,
        global_batch_size=1024,
        layout="dp 8",
        terms={"gemm_s": 1.5, "attention_s": 0.25, "bubble_s": 0.0, "update_s": 12.34},
        step_s=Range(value=2.5, low=2.25, high=2.75),
        tokens_s_gpu=Range(value=12_345.6, low=None, high=None),
        efficiency=1.0,
        samples=12_345.0,
        samples_low=11_000.0,
        samples_high=13_000.0,
        samples_source="8 runs",
        minutes=Range(value=100.0, low=99.96, high=101.4),
        lost_share=0.123,
        checkpoint_interval_s=90.0,
        days=Range(value=0.0, low=0.0694, high=0.5),
        gpu_hours=Range(value=9.996, low=1.0, high=10.04),
        energy_kwh=Range(value=1234.0, low=0.9996, high=2000.0),
        price=Range(value=33.25, low=30.0, high=40.0),
    )
    second = replace(
        first, num_nodes=2, num_gpus=16, efficiency=0.456, terms={"gemm_s": 0.75}, lost_share=None, samples_low=None
    )
    none = Point(num_nodes=4, num_gpus=32, global_batch_size=2048, why_not="no layout fits")
    measured = Interval(low=0.94, high=1.06, num_rows=7, rows="measured steps")
    full = Scaling(
        stack=StackName.runstop,
        points=(first, second, none),
        pays_until=2,
        intervals=(measured, replace(measured, num_rows=9, rows="published steps")),
        not_calibrated="",
        currency="EUR",
        power_source="the data sheet",
        published=(PublishedSpeed(system="one", num_gpus=8, tokens_s_gpu=11_000.0),),
    )
    bare = replace(first, lost_share=None, checkpoint_interval_s=None, days=None, energy_kwh=None, price=None)
    other = replace(
        full,
        stack=StackName.reference,
        points=(replace(bare, samples_source="", samples=None), replace(none, num_nodes=2)),
        pays_until=1,
        intervals=(),
        not_calibrated="no row is of this GPU",
        power_source="",
    )
    for one in (full, replace(full, pays_until=1), other, replace(other, pays_until=None, points=(none,))):
        yield scaling.sheet(one, "lora70b on dgx")
        yield scaling.terms_sheet(one)


def machines() -> Iterator[TextTable]:
    rates = Rates(
        source="measured",
        layer_tflop=[0.5, 1.25],
        bf16_tflops=[300.4, 600.6],
        fp8_tflops=[500.0, 1000.2],
        attention_forward_tflops=400.0,
        attention_backward_tflops=350.0,
        copy_gbs=3000.0,
        busbw_mib=[1.0, 64.5],
        busbw_gbs=[50.0, 300.0],
        launch_us=5.25,
        host_gbs=25.0,
        fp8_weight_gradient_tflops=900.0,
        attention_forward_4096_tflops=380.0,
        attention_backward_4096_tflops=330.0,
        elementwise_gbs=2500.0,
        narrow_heads_forward=0.755,
        narrow_heads_backward=0.6,
    )
    gpu = Gpu(name="X", memory_gib=80.0, peak_bf16_tflops=900.0, peak_fp8_tflops=1800.0, source="", rates=rates)
    yield from calibration.tables(gpu, skipped=[])
    least = replace(rates, busbw_mib=[], busbw_gbs=[], host_gbs=None, elementwise_gbs=None, narrow_heads_forward=None)
    older = replace(gpu, peak_fp8_tflops=None, rates=least)
    yield from calibration.tables(older, skipped=["large", "larger"], link_error="no link")
    seconds = {part: 60.0 * number for number, part in enumerate(Part)}
    trial = TrialTime(trial=0, outcome=ledger.Outcome.valid, num_attempts=2, seconds=seconds, notes=("a gap",))
    none = TrialTime(trial=1, outcome=ledger.Outcome.valid, num_attempts=1, seconds=dict.fromkeys(Part, 0.0), notes=())
    yield goodput.goodput_sheet(Goodput(folder=Path("runs/a"), num_gpus=16, trials=(trial, none)))
    yield goodput.goodput_sheet(Goodput(folder=Path("runs/b"), num_gpus=None, trials=(none,)))


def files() -> Iterator[TextTable]:
    imported = store.Record(
        version=1,
        file="x.sqsh",
        source="docker://nvcr.io/nvidia/pytorch:25.11-py3",
        sha256="ab" * 32,
        size_bytes=3 * 2**29,
        imported="2026-11-22T10:00:00Z",
        importer="enroot 4",
        architecture="x86_64",
        os_release={"PRETTY_NAME": "Ubuntu 24.04"},
        marker={"name": "runstop-train", "base": "pytorch", "commit": "abc", "versions": {"torch": "2.9", "te": "2"}},
    )
    path, bare = Path("/images/x.sqsh"), replace(imported, architecture=None, os_release=None, marker=None)
    for known in (imported, replace(imported, source="podman://x@sha256:12"), replace(bare, source="/a/file.sqsh")):
        for is_new in (True, False):
            yield images.imported_sheet(importer.Imported(path=path, record=known, is_new=is_new))
    faults = [broken("ENR-08", "too short", "x.sqsh"), broken("ENR-11", "no digest", "x.sqsh")]
    yield images.verified_sheet(path, imported, [])
    yield images.verified_sheet(path, None, faults)
    entries = [
        store.Entry(path=path, size_bytes=3 * 2**29, record=imported, faults=[]),
        store.Entry(path=Path("/images/y.txt"), size_bytes=2**28, record=None, faults=faults),
    ]
    yield images.list_sheet(Path("/images"), entries)
    yield images.list_sheet(Path("/images"), [])
    sizes = {"a": 99_999_999, "b": 10**9}
    remote = tuple(hub.RemoteFile(path=name, bytes=size, checksum="sha256:0") for name, size in sizes.items())
    repo = hub.Repository(
        kind="model", name="org/name", endpoint="https://hf", revision="abc", is_gated=True, files=remote
    )
    request = download.Request(kind="model", repo="org/name", folder=Path("/m/n"), everything=True)
    planned = download.Planned(
        request=request, repo=repo, files=remote, is_continued=False, present_bytes=0, free_bytes=10**8
    )
    yield fetch.planned_sheet(planned, "")
    part = replace(
        planned, files=remote[1:], is_continued=True, present_bytes=10**8, repo=replace(repo, is_gated=False)
    )
    yield fetch.planned_sheet(part, "HF_TOKEN")
    yield fetch.planned_sheet(replace(planned, request=replace(request, revision="v1")), "HF_TOKEN")
    fetched = {"a": record.Fetched(bytes=10**9, sha256="1", hub_checksum="sha256:1")}
    kept = record.Record(kind="model", repo="org/name", endpoint="https://hf", revision="abc", files=fetched)
    for one in (kept, replace(kept, kind="data", complete=True, options=("--all",))):
        yield fetch.fetched_sheet(Path("/m/a folder"), one)
        yield fetch.checked_sheet(Path("/m/a folder"), one, [])
        yield fetch.checked_sheet(Path("/m/a folder"), one, [("a", "is missing")])


def mlperf(folder: Path) -> Iterator[TextTable]:
    scored = _scored(folder)
    yield from result.score_sheets(scored)
    bad = broken("SCO-01", "3 runs, but 10 are required", "the set")
    counted = replace(
        scored,
        num_gpus=8,
        num_runs_required=10,
        num_failed=1,
        olympic_minutes=101.25,
        olympic_samples=172_032.5,
        rcp_mean_samples=160_000.25,
        rcp_min_samples=150_000.75,
        rcp_factor=1.0123,
        official_minutes=102.5,
        interval_minutes=(101.0, 104.0),
        samples_distribution={12_288: 2, 24_576: 1},
        dropped_reasons=("result_0.txt: fastest", "result_1.txt: slowest"),
        findings=(bad, replace(bad, severity="warning")),
        disagreements=("result_0.txt: only ours is valid",),
        compliance=tuple(Verdict("5.1.0", passed, ()) for passed in (True, False, None)),
    )
    yield from result.score_sheets(counted)
    yield from result.score_sheets(replace(counted, findings=(), official_minutes=None, num_gpus=2, num_runs=1))
    for one in (replace(counted, num_gpus=None), replace(counted, interval_minutes=None, num_gpus=10**6)):
        yield from result.score_sheets(one)
    passed = checkers.CheckerResult(passed=True, messages=(), transcript=())
    entries = (
        package_entries.Entry(system="s", benchmark="lora", runs=()),
        package_entries.Entry(system="t", benchmark="lora", runs=()),
    )
    checked = checkers.Checked(
        checks={"package": passed, "seed": replace(passed, passed=False)},
        scaling={"results/s/lora/scaling.json": 1.012345678},
    )
    packed = Package(
        request=Request(runs=(), folder=Path("out"), org="example"),
        ruleset="5.1.0",
        division="closed",
        entries=entries,
        findings=(replace(bad, severity="warning"),),
        checked=checked,
        todo={"s.json": ["host_memory", "cooling"]},
        energy_j={"results/s/lora": 1_234_567.0},
    )
    yield result.package_sheet(packed)
    yield result.package_sheet(replace(packed, checked=replace(checked, checks={"package": passed}), todo={}))
    entry = results_repository.Entry(
        folder="x",
        benchmark="llama2_70b_lora",
        round="v5.1",
        submitter="one",
        system="big",
        division="closed",
        availability="Available on-premise",
        num_nodes=2,
        num_gpus=16,
        accelerator="NVIDIA H200-SXM5-141GB",
        global_batch_size=8,
        tp=1,
        pp=2,
        cp=3,
        num_runs=10,
        num_failed=1,
        olympic_minutes=12.0,
        rcp_factor=1.0,
        minutes=12.3456,
        mean_samples=3_072.5,
        samples=((3072, 10),),
        eval_interval=384,
        step_time_s=1.0,
        tokens_s_gpu=12_345.6,
        valid=True,
        notes=(),
    )
    unknown = replace(
        entry, system="unknown", num_gpus=None, accelerator="", minutes=None, tp=None, notes=("no GPUs",), num_failed=0
    )
    others = [
        replace(entry, system="open", division="open"),
        replace(entry, system="slower", minutes=13.0, num_gpus=8, accelerator="other"),
        replace(entry, system="no score", minutes=None, division=None),
        replace(entry, benchmark="llama31_8b", system="third", num_failed=None),
    ]
    yield from published.published_sheets([entry, unknown, *others])
    yield from published.published_sheets([entry])


def _scored(folder: Path) -> Score:
    trained = planned_log.planned("llama31_8b")
    for number in range(3):
        losses = [6.0 - 0.2 * each for each in range(14 + number)]
        planned_log.write(trained, folder / f"result_{number}.txt", losses, step_s=2.0 + 0.1 * number)
    return replace(score(folder, ruleset="5.1.0"), folder="logs")


def speeds() -> Iterator[TextTable]:
    names = ("output_throughput", "request_throughput", "latency_p50", "latency_p99")
    numbers = dict(zip(names, (1234.5, 2.5, 0.5, 1.25), strict=True))
    tokens = dict(zip(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"), (0.1, 0.2, 0.01, 0.02), strict=True))
    one = Summary(source="vllm", load="burst", requests=1000, failed=2, **numbers, **tokens)
    less = replace(one, source="other", failed=None, **dict.fromkeys(tokens), why_no_tokens="it has none")
    yield serving.loads_of_tools([one, less])
    candidate = Candidate(
        rank=1,
        name="dp 8",
        overrides=("parallel.tp=1",),
        memory_gib=70.125,
        capacity_gib=79.6,
        step_ms=1234.5,
        low_ms=1200.0,
        high_ms=1300.0,
    )
    best = Tried(
        candidate=candidate,
        outcome=Outcome.fastest,
        values_ms=(1000.0, 999.4),
        median_ms=999.7,
        low_ms=990.0,
        high_ms=1010,
    )
    slower = replace(
        best,
        candidate=replace(candidate, rank=2, name="tp 8", step_ms=None, capacity_gib=None),
        outcome=Outcome.slower,
        slower_percent=5.04,
        slower_low=3.0,
        slower_high=7.0,
        than="dp 8",
    )
    failed = Tried(candidate=replace(candidate, rank=3, name="pp 8"), outcome=Outcome.failed, reason="out of memory")
    undecided = replace(
        slower, outcome=Outcome.undecided, than="pp 8", candidate=replace(candidate, rank=4, name="cp 8")
    )
    measured = Tuning(
        task="lora70b",
        cluster="dgx",
        folder="runs/studies/x",
        num_candidates=12,
        tried=(best, slower, failed, undecided),
        best="dp 8",
        stopped_by="the budget",
        num_blocks=2,
        steps=20,
        margin=0.02,
        confidence=0.9875,
        estimated_by="7 measured steps",
        overrides_file="best.txt",
        commit="abc",
        hardware="8 x H200",
        command="runstop tune task=lora70b",
    )
    many = [replace(best, candidate=replace(candidate, rank=n, name=f"dp {n}"), values_ms=()) for n in range(1, 24)]
    planned = replace(measured, tried=tuple(replace(each, outcome=Outcome.not_measured) for each in many), best="")
    tunings = [
        measured,
        replace(measured, tried=(best, slower, failed), best="tp 8"),
        replace(measured, num_blocks=1),
        planned,
        replace(planned, tried=planned.tried[:20], estimated_by="no rates"),
        replace(planned, tried=tuple(replace(each, candidate=replace(candidate, step_ms=None)) for each in many[:1])),
    ]
    yield from map(tuning.table, tunings)
    pages = [
        tuning.markdown(one) for one in (measured, replace(planned, tried=planned.tried[:1], commit="", hardware=""))
    ]
    yield from (TextTable("page", [], caption=page) for page in pages)


def printed(sheets: Sequence[TextTable]) -> str:
    """Return tables as a pipe gets them."""
    out = io.StringIO()
    for one in sheets:
        sheet.show(one, file=out)
        print(file=out)
    return out.getvalue()


@pytest.mark.long
def test_sheets_are_the_golden_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_log.without_this_machine(monkeypatch)
    user_tables.leave_out(monkeypatch)
    groups = (checks(), studies(Path("/study")), predictions(), machines(), files(), mlperf(tmp_path), speeds())
    tables = [table for group in groups for table in group]
    texts = [printed(tables), fetch.locations_text("llama2_70b_lora")]
    for columns in (60, 120):
        screen = terminal(monkeypatch, columns)
        for table in tables[::3]:
            sheet.show(table, file=screen)
        texts += [f"on {columns} columns", screen.text]
    golden.require("\n".join(texts), GOLDEN, variable="WRITE_SHEETS")
