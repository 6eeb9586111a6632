"""Random weights: throughput compared with published systems, from plan to report, without time to train and score."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import report
from bench.backends.slurm import script
from bench.cli import main
from bench.contract import mllog, plan_kinds, plan_paths
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.schema import Device, Precision
from bench.errors import ConfigError, LogError
from bench.mlperf import package, published
from bench.mlperf.result import parse
from bench.mlperf.score import score
from bench.planning import compose
from bench.planning.estimates import flops
from bench.report import compare, sets, throughput
from bench.runs import ledger
from bench.runs import trial as trials
from bench.watch import sources
from helpers import clock, ranks
from helpers.paths import CORPUS

RANDOM = "model.weights=random"
SEVENTY_B = ("task=lora70b", "cluster=dgxh200", RANDOM, "task.training.max_steps=60")
STEP_S, EVAL_S = 2.8, 24.0
Spawn = Callable[..., "subprocess.Popen[str]"]
SpeedLog = Callable[..., Path]


@pytest.fixture
def speed_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpeedLog:
    """Write the log of 60 steps of lora70b with random weights on 8 H200, with simulated time."""

    def write(*, steps: int = 60, folder: str = "run", **changes: object) -> Path:
        time = clock.turned(monkeypatch)
        mark = "8x H200 (lora70b: not a submission)"
        facts = {
            mllog.SUBMISSION_ORG: mark,
            mllog.SUBMISSION_PLATFORM: mark,
            mllog.SUBMISSION_DIVISION: "open",
            mllog.SEED: 1,
            mllog.GLOBAL_BATCH_SIZE: 8,
            "max_sequence_length": 8192,
            "num_ranks": 8,
            "accelerator": "NVIDIA H200",
            mllog.MODEL_TFLOP_PER_SAMPLE: 2500.0,
            mllog.ACCELERATOR_PEAK_TFLOPS: 1978.9,
        }
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / "result_0.txt"
        with mllog.Writer(path) as log:
            log.start(mllog.INIT_START)
            log.event(mllog.INITIAL_WEIGHTS, mllog.RANDOM, shape_of="llama2_70b_lora")
            for key, value in (facts | changes).items():
                log.event(key, value)
            log.stop(mllog.INIT_STOP)
            log.start(mllog.RUN_START)
            log.start(mllog.BLOCK_START, samples_count=0)
            for step in range(10, steps + 1, 10):
                time.now_s += 10 * STEP_S
                place = {"samples_count": 8 * step, "step": step}
                log.event(mllog.TRAIN_LOSS, 10.4, **place)
                times = [STEP_S - 0.01, *[STEP_S] * 8, STEP_S + 0.01]
                log.event(mllog.TRACKED_STATS, {"train_step_time": STEP_S, mllog.STEP_TIMES: times}, **place)
            log.stop(mllog.BLOCK_STOP, **place)
            log.start(mllog.EVAL_START, **place)
            time.now_s += EVAL_S
            log.event(mllog.EVAL_ACCURACY, 10.4, **place)
            log.stop(mllog.EVAL_STOP, **place)
            log.finish(mllog.SUCCESS, **place)
            log.event(mllog.PEAK_MEMORY, {"allocated": 120.5, "reserved": 131.25, "estimated": 118.0})
        return path

    return write


@pytest.mark.long
def test_flops_per_sample() -> None:
    """Llama 2 70B under LoRA, and Llama 3.1 8B pre-training with 128,000 tokens, as in NVIDIA's MLPerf configs."""
    lora70b = compose.compose(SEVENTY_B)
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    frozen, adapters = 80 * layer + 8192 * 32000, 44_564_480
    attention = 6 * 8192 * 8192 * 80
    assert lora70b.tflop_per_sample == pytest.approx((4 * frozen + 6 * adapters + attention) * 8192 / 1e12, rel=1e-12)
    assert lora70b.tflop_per_sample == pytest.approx(2517.7, abs=0.05)
    model = compose.compose(
        ["task=lora70b", "model=llama31_8b", "cluster=dgxh200", "model.vocab_size=128000"]
    ).config.model
    assert flops.tflop_per_sample(model, None, seq_length=8192) == pytest.approx(421.59, abs=0.005)


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989.4), ("fp8", 1978.9), ("fp32", None)])
def test_the_peak_is_that_of_the_precision(precision: str, peak: float | None) -> None:
    plan = compose.compose(SEVENTY_B)
    assert plan.peak_tflops == flops.peak_tflops(replace(plan.config, precision=Precision.fp8)) == 1978.9
    assert flops.peak_tflops(replace(plan.config, precision=Precision[precision])) == peak
    assert flops.peak_tflops(replace(plan.config, cluster=replace(plan.config.cluster, device=Device.cpu))) is None


def test_plan_with_random_weights_needs_no_files_and_is_no_submission() -> None:
    plan = compose.compose(SEVENTY_B)
    assert (plan.data_dir, plan.base_dir, plan.base, plan.config.task.training.target_eval_loss) == (None,) * 4
    assert (plan.evaluation.at_steps, plan.evaluation.first_step) == ([60], 60)
    assert plans.command(plan, plans.PREPARE) is None and plan_paths.is_prepared(plan)
    assert not {"prepare.txt", "loss_0.png", "adapters_0/"} & set(plan.files)
    submission = plan.submission
    assert (submission.benchmark, submission.division, submission.shape_of) == (None, "open", "llama2_70b_lora")
    assert all("(lora70b: not a submission)" in mark for mark in (submission.org, submission.platform))
    assert submission.deviations == ["task lora70b has no target: it measures speed, not a time to train"]
    assert script.variables(plan) == ["LOGDIR", "CONT"], "no DATADIR, no MODEL"
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


def test_a_longer_run_is_evaluated_as_scheduled_and_at_its_end() -> None:
    plan = compose.compose([*SEVENTY_B, "task.training.max_steps=250"])
    assert plan.evaluation.at_steps == [192, 240, 250]


@pytest.mark.parametrize(
    "other", ["model=llama31_8b", "data.seq_length=4096", "task.training.lora.rank=8", "data.eval_rows=100"]
)
def test_other_model_sizes_are_not_compared_with_benchmarks(other: str) -> None:
    assert compose.compose([*SEVENTY_B, other]).submission.shape_of is None


def test_a_profile_needs_a_warm_up_step() -> None:
    with pytest.raises(ConfigError, match="the profiler records the last warm-up step"):
        compose.compose(["launch.profile=kernels", "recipe.warmup_iterations=0"])


@pytest.mark.long
def test_a_profile_has_a_kind() -> None:
    """Older configs have a switch."""
    expected = "launch.profile is true, but must be one of none, kernels, modules, nsys\n  where: launch.profile"
    with pytest.raises(ConfigError, match=expected):
        compose.compose(["launch.profile=true"])


def test_log_with_random_weights_has_throughput_but_no_time_to_train(speed_log: SpeedLog) -> None:
    result = parse(speed_log())
    assert result.valid and not result.has_target and result.has_random_rows
    assert (result.samples_to_target, result.target) == (None, None)
    assert [(f.rule, f.severity) for f in result.findings] == [("LOG-16", "warning")]
    steps = result.step_time_ms
    assert steps is not None and (steps.count, steps.median) == (60, pytest.approx(1000 * STEP_S))
    assert result.step_times_ms[0] == (8, pytest.approx(2790)) and result.step_times_ms[-1][0] == 480
    assert result.throughput_samples_s == pytest.approx(8 / STEP_S, rel=1e-3)
    assert result.tokens_s_gpu == pytest.approx(8192 / STEP_S, rel=1e-3)
    assert result.tflops_gpu == pytest.approx(2500 / STEP_S, rel=1e-3)
    assert result.mfu == pytest.approx(2500 / STEP_S / 1978.9, rel=1e-3)
    assert (result.eval_time_s, result.eval_times_s) == (pytest.approx(EVAL_S), (pytest.approx(EVAL_S),))
    assert result.peak_memory_gib is not None
    assert (result.peak_memory_gib.allocated, result.peak_memory_gib.estimated) == (120.5, 118.0)


def test_a_set_is_measured_on_its_valid_trials(speed_log: SpeedLog) -> None:
    """The highest memory of all GPUs counts; invalid trials are left out."""
    folder = speed_log().parent
    for number, peak in enumerate((100.25, 130.75, 110.5), 1):
        text = (folder / "result_0.txt").read_text().replace("120.5", str(peak))
        text = text.replace('"seed", "value": 1', f'"seed", "value": {number + 1}')
        (folder / f"result_{number}.txt").write_text(text)
    (folder / "result_9.txt").write_text(
        (folder / "result_0.txt").read_text().replace("120.5", "999.0").replace('"success"', '"aborted"')
    )
    (trials,) = sets.load([folder])
    measured = throughput.measure(trials)
    assert measured.num_runs == 4 and len(trials.results) == 5
    assert measured.peak_memory_gib is not None and measured.peak_memory_gib.allocated == 130.75
    assert measured.step_time_ms is not None and measured.step_time_ms.count == 4 * 60


def test_num_gpus_option_gives_all_rates(speed_log: SpeedLog, capsys: pytest.CaptureFixture[str]) -> None:
    """8 samples of 8,192 tokens and 2,500 TFLOP in 2.8 s on 8 GPUs, whose peak is 1,978.9 TFLOP/s."""
    folder = speed_log(accelerator=None).parent
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--num-gpus", "8"])
    printed = capsys.readouterr().out
    assert f"tokens/s/GPU: {8192 / STEP_S:,.0f}" in printed and f"TFLOP/s/GPU: {2500 / STEP_S:,.1f}" in printed
    assert f"MFU (%): {100 * 2500 / STEP_S / 1978.9:.1f}" in printed and "published systems with 8" in printed
    (trials,) = sets.load([folder], num_gpus=8)
    (row,) = report.trial_rows([trials])
    assert row["tokens_s_gpu"] == pytest.approx(8192 / STEP_S)


def test_page_is_written_with_folder_and_title_options(
    speed_log: SpeedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def write(trials: list[sets.TrialSet], out: Path, *, title: str) -> Path:
        written.append(([one.results for one in trials], out, title))
        return out / "report.html"

    monkeypatch.setattr(report, "write", write)
    folder = speed_log().parent
    with pytest.raises(SystemExit):
        main(["report", str(folder), "-o", f"{tmp_path}/out", "--title", "a page"])
    assert written == [([one.results for one in sets.load([folder], num_gpus=None)], tmp_path / "out", "a page")]
    assert f"{tmp_path}/out/report.html\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "status", "why"),
    [
        ({"accelerator": None}, "success", "not measured on GPUs, or the logs have no GPU count"),
        ({"max_sequence_length": None}, "success", "no sequence length in the logs"),
        ({}, "aborted", "no valid trial"),
    ],
)
def test_missing_rate_has_a_reason(
    speed_log: SpeedLog, change: dict[str, object], status: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = speed_log(**change)
    log.write_text(log.read_text().replace('"success"', f'"{status}"'))
    with pytest.raises(SystemExit):
        main(["report", str(log.parent)])
    printed = capsys.readouterr().out
    assert f"tokens/s/GPU: {why}" in printed
    if status == "aborted":
        for row in ("TFLOP/s/GPU", "MFU (%)", "peak memory (GiB)", "projected minutes: none", "not compared"):
            assert f"{row}: {why}" in printed, row


def test_random_weights_with_a_benchmark_name_are_invalid(speed_log: SpeedLog) -> None:
    posing = parse(speed_log(submission_benchmark="llama2_70b_lora"))
    assert not posing.valid
    assert ("LOG-16", "error") in [(f.rule, f.severity) for f in posing.findings]


def test_score_and_pack_refuse_random_weights(speed_log: SpeedLog, tmp_path: Path) -> None:
    folder = speed_log().parent
    with pytest.raises(LogError, match="at least one trial has no target"):
        score(folder)
    request = package.Request(runs=(folder,), folder=tmp_path / "package", org="example", force=True)
    with pytest.raises(ConfigError, match="the run has no target"):
        package.pack(request)
    assert not (tmp_path / "package").exists()


@pytest.mark.long
def test_report_compares_throughput_with_published_systems(
    speed_log: SpeedLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = speed_log().parent
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder), "-o", str(tmp_path / "out")])
    printed, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
    assert stop.value.code == 0
    best = next(s for s in published.systems() if s.system.startswith("SR680aV3-8xH200") and s.round == "v4.1")
    assert best.step_time_s is not None
    line = next(text for text in printed.splitlines() if best.system in text).split("\t")
    assert line[-2:] == [f"{best.official_minutes:.2f}", f"{best.step_time_s / STEP_S:.3f}"]
    minutes = (3178.667 * STEP_S / 8 + (1 + (3178.667 - 1536) / 384) * EVAL_S) / 60
    label = "projection from 3,179 samples (reference mean at batch size 8), not a result"
    assert f"projected minutes: {minutes:.2f}  {label}" in printed
    assert "TFLOP/s/GPU: 892.9" in printed and ">892.9<" in page
    assert label in page and "Score</h3>" not in page and "olympic" not in page
    assert not (tmp_path / "out" / "convergence.png").exists()
    (trials,) = sets.load([folder])
    claim = compare.claim(trials)
    assert (claim.kind, claim.minutes, trials.score.official_minutes, trials.score.olympic_minutes) == (
        "throughput",
        *[None] * 3,
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"global_batch_size": 4}, "no reference convergence point at batch size 4"),
        ({"num_ranks": 7}, "no published system .* has 7 GPUs"),
    ],
)
def test_impossible_comparison_has_a_reason(
    speed_log: SpeedLog, change: dict[str, int], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(speed_log(**change).parent)])
    assert re.search(why, capsys.readouterr().out)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of real logs is not here")
@pytest.mark.parametrize(
    ("log", "tolerance"),
    [
        ("v4.0/smc/1xSMC-H100-SXM-80GB", 0.005),
        ("v4.1/Lenovo/SR680aV3-8xH200_SXM_141GB_700W", 0.005),
        ("v5.0/Oracle/1xBM.GPU.H200.8", 0.015),
        ("v5.1/Dell/1xXE9680Lx8H200-SXM-141GB", 0.005),
    ],
)
def test_the_projection_of_published_speeds_is_near_their_official_minutes(log: str, tolerance: float) -> None:
    (trials,) = sets.load([CORPUS / log / "llama2_70b_lora"])
    measured = replace(throughput.measure(trials), shape_of="llama2_70b_lora")
    projection, why_not = throughput.project(measured, ruleset="5.1.0")
    version, submitter, system = log.split("/")
    official = next(s for s in published.systems() if (s.round, s.submitter, s.system) == (version, submitter, system))
    assert projection is not None, why_not
    assert projection.minutes == pytest.approx(official.official_minutes, rel=tolerance)


def test_projection_needs_step_and_evaluation_times(speed_log: SpeedLog) -> None:
    (trials,) = sets.load([speed_log().parent])
    measured = throughput.measure(trials)
    assert throughput.project(measured, ruleset="5.1.0")[0] is not None
    untimed = "no valid trial with step times and an evaluation time"
    assert throughput.project(replace(measured, eval_time_s=None), ruleset="5.1.0") == (None, untimed)
    assert throughput.project(replace(measured, samples_s=None), ruleset="5.1.0") == (None, untimed)


@pytest.mark.trains
def test_a_run_on_this_machine_ends_valid_with_every_step_timed(spawn: Spawn, tmp_path: Path) -> None:
    """No cache, no rows, no base: only the run's own folder is written."""
    words = (
        "task=lora_tiny",
        RANDOM,
        "task.training.max_steps=20",
        "data.eval_rows=16",
        "launch.profile=kernels",
        f"launch.folder={tmp_path}/run",
    )
    process = spawn(
        [sys.executable, "-m", "bench.launch", *words], {"DATADIR": "", "MODEL": "", "LOGDIR": str(tmp_path)}
    )
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert "nothing to prepare" in output and "speed only (no target set)" in output
    run = tmp_path / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shown = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    words = {"config.yaml", "plan.json", "ledger.json", "status.json", "manifest.json"}
    assert shown == words | {"result_0.txt", "rank_logs"}
    result = parse(run / "result_0.txt")
    assert result.valid and not result.has_target and result.has_random_rows
    assert result.step_time_ms is not None and result.step_time_ms.count == 20
    assert 0.8 < sum(ms for _, ms in result.step_times_ms) / (20_000 * 8 / result.throughput_samples_s) < 1.1
    assert [e.samples for e in result.evaluations] == [160] and result.tflop_per_sample > 0
    assert (result.tflops_gpu, result.peak_memory_gib) == (None, None), "no GPU measured it"
    assert "aten::mm" in (run / "rank_logs" / "trial_0.profile").read_text()
    assert json.loads((run / "ledger.json").read_text())[0]["outcome"] == ledger.Outcome.valid
    assert sources.run_folder(run).prepare is None
    check_not_as_planned(plan_kinds.load(run / "plan.json"), run)


def check_not_as_planned(plan: Plan, run: Path) -> None:
    """A log with fewer steps than planned makes the run invalid."""
    longer = replace(plan, max_steps=30)
    judged = trials.judge(run / "result_0.txt", longer, plan.trials[0])
    assert not judged.valid and list(judged.differences) == [
        "samples trained on is 160 in the log, but 240 in the plan"
    ]


@pytest.mark.trains
@pytest.mark.slow
def test_one_rank_of_a_layout_runs_alone() -> None:
    path = {"PYTHONPATH": str(ranks.ROOT)}

    def run_rank(*overrides: str) -> tuple[int, str]:
        argv = [sys.executable, "experiments/one_rank.py", "--rank", "3", "--steps", "2", "task=lora_tiny", *overrides]
        done = subprocess.run(argv, cwd=ranks.ROOT, capture_output=True, text=True, env=os.environ | path)
        return done.returncode, done.stdout + done.stderr

    split = ("cluster.ranks_per_node=4", "parallel.tp=2", "parallel.sp=true", "parallel.pp=2")
    code, printed = run_rank(RANDOM, *split)
    assert (code, printed.splitlines()[0]) == (0, "rank 3 of 4 = dp 1 x tp 2 x pp 2 x cp 1, sp True, vpp 1"), printed
    assert re.search(r"^step \d\.\d+ s, without what other ranks take", printed, re.MULTILINE)
    assert run_rank(*split)[0] == 2 and "there is no rank 3" in run_rank(RANDOM)[1]
