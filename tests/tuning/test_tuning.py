"""`runstop tune`: ranking, blocks of runs, proof, and overrides of the fastest; a stub replaces the ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import studies, tuning
from bench.cli import main
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan, required
from bench.errors import BenchError, ConfigError, Stopped, SubmitError
from bench.launch import run_here
from bench.planning import compose, overrides
from bench.results.tuning import Outcome, Tuning
from bench.runs.status import Ending, Status
from helpers import golden, study_runs
from helpers.golden import significant

FIRST, SECOND, THIRD = "dp 2 micro-batch 4", "tp 2 sp micro-batch 8", "tp 2 micro-batch 8"
"""The ranking of lora_tiny on two CPU ranks."""
SLUGS = {name: name.replace(" ", "_") for name in (FIRST, SECOND, THIRD)}


class Ranks:
    """Replaces `run_here.run`: every run is valid, and its steps take as long as the test says."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.plans: list[Plan] = []
        self.step_s: dict[str, float] = {}
        """By the name of the run folder, or by the settings of a run; others take 0.1 s."""
        self.ends: dict[str, BaseException] = {}
        """By the name of the run folder."""
        self.invalid: set[str] = set()
        """Names of run folders."""
        self.seconds = 0.0

    def run(self, plan: Plan, folder: Path) -> int:
        self.began.append(folder.name)
        self.plans.append(plan)
        self.seconds += 60
        if (end := self.ends.get(folder.name)) is not None:
            if isinstance(end, SubmitError):
                study_runs.fail(folder, "RUN-01", "out of memory")
            raise end
        step_s = self.step_s.get(folder.name, self.step_s.get(folder.stem, 0.1))
        noise = 1 + 0.001 * int(folder.suffix[1:])
        study_runs.prove(folder, [1.0] * 5 + [step_s * noise] * 20)
        if folder.name in self.invalid:
            study_runs.ended(folder, "invalid", Status(outcome=Ending.invalid, exit_code=1))
        return 0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    stub = Ranks()
    stub.step_s = {SLUGS[FIRST]: 0.2, SLUGS[SECOND]: 0.1, SLUGS[THIRD]: 0.4}
    monkeypatch.setattr(run_here, "run", stub.run)
    return stub


Call = Callable[..., Tuning]


@pytest.fixture
def call(tmp_path: Path, ranks: Ranks) -> Call:
    paths = tuple(f"cluster.paths.{name}={tmp_path}" for name in ("logs", "data", "model"))

    def call(*words: str, **options: float) -> Tuning:
        overrides_of_call = ("task=lora_tiny", "cluster=local", "cluster.device=cpu", *paths, *words)
        request = tuning.Request(overrides=overrides_of_call, **{"best": 3, **options})  # type: ignore[arg-type]
        return tuning.tune(request, say=lambda _: None, clock=lambda: ranks.seconds)

    return call


def outcomes(result: Tuning) -> dict[str, Outcome]:
    return {one.candidate.name: one.outcome for one in result.tried}


@pytest.mark.long
def test_the_fastest_is_found_in_blocks_and_written_with_its_proof(call: Call, ranks: Ranks) -> None:
    result = call()
    assert result.best == SECOND and result.is_decided and result.num_blocks == 2
    assert outcomes(result) == {FIRST: Outcome.slower, SECOND: Outcome.fastest, THIRD: Outcome.slower}
    assert [sorted(ranks.began[:3]), sorted(ranks.began[3:])] == [
        sorted(f"{slug}.{block}" for slug in SLUGS.values()) for block in (1, 2)
    ]
    first = result.settings(FIRST)
    assert first is not None and first.slower_percent == pytest.approx(100)
    assert result.regret == pytest.approx(1)
    stored = json.loads((Path(result.folder) / "tuning.json").read_text())
    assert stored["best"] == SECOND
    assert stored["tried"][1]["values_ms"] == pytest.approx([100.1, 100.2])
    assert f"| 2 | {SECOND} | - |" in (Path(result.folder) / "tuning.md").read_text()


@pytest.mark.long
def test_runs_differ_only_in_their_settings_and_measure_only_speed(call: Call, ranks: Ranks) -> None:
    call(blocks=2)
    plans = [required(plan, TrainingPlan) for plan in ranks.plans]
    assert {(plan.batch.global_batch_size, plan.max_steps) for plan in plans} == {(8, 25)}
    assert {plan.config.training_recipe.eval_every_samples for plan in plans} == {8 * 25}, "only after the last step"
    assert {plan.config.model.weights.name for plan in plans} == {"random"}
    assert {(plan.world.tp, plan.world.sp, plan.batch.micro_batch_size) for plan in plans} == {
        (1, False, 4),
        (2, True, 8),
        (2, False, 8),
    }
    assert {plan.trials[0].seed for plan in plans[:3]} != {plan.trials[0].seed for plan in plans[3:]}


@pytest.mark.long
def test_launch_accepts_the_overrides_of_the_fastest(call: Call) -> None:
    words = overrides.of_files([f"@{call('recipe.lr=0.001').overrides_file}"])
    plan = required(compose.compose(words), TrainingPlan)
    assert (plan.world.tp, plan.world.sp, plan.batch.micro_batch_size) == (2, True, 8)
    assert plan.config.training_recipe.lr == 0.001 and plan.max_steps == 1024
    assert plan.config.model.weights.name != "random"


@pytest.mark.long
def test_another_call_runs_nothing_again(call: Call, ranks: Ranks) -> None:
    first = call()
    ranks.began.clear()
    assert call() == first and not ranks.began
    assert call(steps=10).folder != first.folder, "shorter runs are no runs of this measurement"


@pytest.mark.long
def test_a_stopped_call_keeps_its_runs_and_another_continues(
    call: Call, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.ends = {f"{SLUGS[THIRD]}.1": Stopped(2)}
    with pytest.raises(Stopped):
        call()
    assert "stopped; to continue: " in (err := capsys.readouterr().err) and " tune task=lora_tiny cluster=local" in err
    done, ranks.ends = set(ranks.began) - {f"{SLUGS[THIRD]}.1"}, {}
    ranks.began.clear()
    assert call().best == SECOND
    assert not done & set(ranks.began) and f"{SLUGS[THIRD]}.1" in ranks.began


@pytest.mark.long
def test_settings_that_run_out_of_memory_are_left_out(call: Call, ranks: Ranks) -> None:
    ranks.ends = {f"{SLUGS[SECOND]}.1": SubmitError("out of memory", where="rank 0", fix="none", rule="RUN-01")}
    result = call()
    assert result.best == FIRST and outcomes(result)[SECOND] is Outcome.failed
    failed = result.settings(SECOND)
    assert failed is not None and "out of memory" in failed.reason
    assert ranks.began.count(f"{SLUGS[SECOND]}.2") == 0


@pytest.mark.long
def test_settings_whose_run_is_invalid_are_left_out(call: Call, ranks: Ranks) -> None:
    ranks.invalid = {f"{SLUGS[SECOND]}.1"}
    result = call()
    assert result.best == FIRST and result.is_decided and outcomes(result)[SECOND] is Outcome.failed
    assert f"{SLUGS[SECOND]}.2" not in ranks.began


@pytest.mark.long
def test_no_result_at_all_is_an_error_and_another_call_tries_again(call: Call, ranks: Ranks) -> None:
    error = SubmitError("out of memory", where="rank 0", fix="none", rule="RUN-01")
    ranks.ends = {f"{slug}.1": error for slug in SLUGS.values()}
    with pytest.raises(BenchError, match="no run has a result, so runstop cannot choose the best settings"):
        call()
    ranks.ends = {}
    assert call().best == SECOND


@pytest.mark.long
def test_the_budget_ends_the_measurement(call: Call, ranks: Ranks) -> None:
    """A block takes three minutes; another one would end after five."""
    ranks.step_s = {}
    result = call(budget_min=5)
    assert len(ranks.began) == 3 and result.num_blocks == 1 and not result.is_decided
    assert result.stopped_by == "another block would exceed the budget of 5 minutes"
    assert result.command.endswith("--best 3 --budget 5"), "the same call measures the blocks that are left"


@pytest.mark.long
def test_alike_settings_are_measured_up_to_the_limit_and_the_command_goes_on(call: Call, ranks: Ranks) -> None:
    noisy = iter([1.0, 1.2, 0.9, 1.1] * 10)
    prove = study_runs.prove
    ranks.step_s = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_runs, "prove", lambda folder, steps: prove(folder, [next(noisy)] * 25))
        result = call(blocks=3)
    assert result.num_blocks == 3 and Outcome.undecided in outcomes(result).values()
    assert result.stopped_by == "each has 3 runs, the most that --blocks allows"
    assert "--blocks 6" not in result.command  # the default
    assert result.command.endswith("--best 3")


NOISY = {FIRST: (0.1, 0.104, 0.096), SECOND: (0.1, 0.101, 0.0995), THIRD: (0.12, 0.2, 0.3)}
"""Seconds of a step, by settings and block."""


@pytest.mark.long
@pytest.mark.parametrize("case", ["undecided", "failed", "decided"])
def test_what_is_written_is_the_golden_text(case: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.step_s = {f"{SLUGS[name]}.{n}": s for name, steps in NOISY.items() for n, s in enumerate(steps, start=1)}
    if case == "failed":
        ranks.ends = {f"{SLUGS[FIRST]}.2": SubmitError("out of memory", where="rank 0", fix="none", rule="RUN-01")}
    elif case == "decided":
        ranks.step_s = {SLUGS[FIRST]: 0.1, SLUGS[SECOND]: 0.101, f"{SLUGS[THIRD]}.1": 0.3, f"{SLUGS[THIRD]}.2": 0.31}
    paths = (f"cluster.paths.{name}={tmp_path}" for name in ("logs", "data", "model"))
    words = ("task=lora_tiny", "cluster=local", "cluster.device=cpu", *paths)
    progress: list[str] = []
    request = tuning.Request(overrides=words, best=3, blocks=3, steps=15, budget_min=500)
    result = tuning.tune(request, say=progress.append, clock=lambda: ranks.seconds)
    folder = Path(result.folder)
    files = [(folder / name).read_text() for name in ("tuning.md", "best.overrides")]
    results = json.dumps(significant(result), default=str, indent=1)
    text = "\n".join([*progress, "", *files, results, ""]).replace(str(folder), "FOLDER").replace(str(tmp_path), "DIR")
    text = text.replace(folder.name, "FOLDER")
    golden.require(text, Path(__file__).with_name(f"golden_{case}.txt"), variable="WRITE_TUNING")


@pytest.mark.long
def test_the_folder_is_that_of_a_study(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    result = call()
    with pytest.raises(SystemExit):
        main(["report", result.folder])
    assert f"study {result.folder} -o DIR" in capsys.readouterr().err
    table = studies.read(Path(result.folder))
    assert [row.arm for row in table.rows] == [FIRST, SECOND, THIRD]
    assert " tune task=lora_tiny " in table.command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["task=serve_tiny"], "tune needs a training task, but task serve_tiny is of kind serve"),
        (["task=lora_tiny", "engine=huggingface"], "set engine=megatron, or choose a task that uses engine=megatron"),
        (["task=pretrain_tiny_local_sgd"], "tune does not support local SGD"),
        (["task=lora_tiny", "trials=3"], "you cannot set trials, because tune sets this key for each run"),
        (["task=lora_tiny", "parallel.tp=3"], "tp 3 does not divide"),
        (["task=lora_tiny", "--blocks", "1"], "--blocks must be at least 2"),
        (["task=lora_tiny", "--out", "page"], "--dry-run starts no run"),
        (["@missing.overrides"], "the file of overrides cannot be read"),
    ],
)
def test_wrong_requests_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *words, "--dry-run"])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.long
def test_a_dry_run_ranks_all_that_fit_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "task=lora70b", "cluster=dgxh200", "precision=fp8", "--dry-run", "--json"])
    assert ended.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "runstop/tuning/1.0" and answer["num_candidates"] == len(answer["settings"]) > 300
    assert answer["settings"][0]["estimated_step_ms"] < answer["settings"][-1]["estimated_step_ms"]
    assert not answer["best"] and not answer["folder"]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "task=lora_tiny\nnot an override\n", '{"task": 1}\n'])
def test_a_file_without_overrides_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match="the file of overrides"):
        overrides.of_files([f"@{tmp_path / 'file'}"])
