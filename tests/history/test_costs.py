"""Costs by hand: GPU hours x price, of a plan, of trials of three kinds, of a history and of a study."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import cli, report
from bench.console import plan as plan_sheets
from bench.console import study as study_sheets
from bench.contract.plan import Cost
from bench.errors import ConfigError
from bench.history import compare
from bench.mlperf.result import parse
from bench.planning import compose
from bench.report import sets
from bench.results.cost import of_measured
from bench.results.kind import read
from bench.results.measurement import Measurement
from bench.results.study import PlannedArm
from helpers import answers, answers_log
from helpers.clock import Clock, turned
from helpers.planted_runs import plant
from jobs.tasks import describe

PRICE = {"price_per_gpu_hour": 3.6, "currency": "EUR"}
EIGHT = {"num_ranks": 8, "accelerator": "NVIDIA H200", "max_sequence_length": 10, "train_samples": 250_000}
STEP = Cost(
    **dict.fromkeys(
        ("gemm_s", "attention_s", "elementwise_s", "communication_s", "recompute_s", "bubble_s", "host_s"), 0.0
    ),
    step_s=1.5,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    return turned(monkeypatch)


def costs(log: Path) -> dict[str, tuple[str, float]]:
    return {one.name: (one.unit, one.value) for one in read(log).of_kind.measurements if "cost" in one.name}


def plan_row(*words: str) -> str | None:
    plan = compose.compose(["task=lora_7b", "cluster=dgx1", *words])
    return dict(plan_sheets.rows(dataclasses.replace(plan, cost=STEP))).get("cost")


@pytest.mark.long
def test_a_plan_has_the_cost_of_its_steps_of_an_epoch_and_of_tokens() -> None:
    """8 GPUs of 2.70 an hour are 0.006 a second: 130 steps, 8192 // 32 steps an epoch, 32 x 4096 tokens a step."""
    assert plan_row("cluster.price_per_gpu_hour=2.7", "cluster.currency=EUR") == (
        "1.17 EUR (estimate) for 130 steps of a trial; 2.30 for an epoch; 0.0687 for a million tokens; "
        "at most 46.80 EUR until the time limit; 8 GPUs at 2.70 EUR per GPU hour"
    )
    assert plan_row() is None, "never guessed"
    random = plan_row("cluster.price_per_gpu_hour=2.7", "model.weights=random", "data=rows_350")
    assert random and "1.17 USD (estimate) for 130 steps" in random and "epoch" not in random


@pytest.mark.long
def test_a_plan_without_a_price_is_that_of_earlier_versions() -> None:
    from bench.contract import plan_kinds

    text = plan_kinds.dumps(compose.compose(["task=lora_7b", "cluster=dgx1"]))
    assert "price_per_gpu_hour" not in text and "currency" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.price_per_gpu_hour=0"], "is 0.0, but must be a positive number"),
        (["cluster.price_per_gpu_hour=inf"], "is inf, but must be a positive number"),
        (["cluster.currency=euros"], "cluster.currency is 'euros', which is not a currency code"),
        (["cluster=local", "cluster.price_per_gpu_hour=1"], "price_per_gpu_hour is 1, but this cluster has no GPUs"),
    ],
)
def test_a_wrong_price_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose.compose(["task=lora_tiny", "cluster=dgx1", *words])


@pytest.mark.long
def test_the_rank_logs_the_price_of_its_plan() -> None:
    plan = compose.compose(["task=lora_7b", "cluster=dgx1", "cluster.price_per_gpu_hour=3.6", "cluster.currency=EUR"])
    assert describe.price(plan) == PRICE
    assert describe.price(compose.compose(["task=lora_7b", "cluster=dgx1"])) == {}


def test_a_training_trial_costs_its_gpu_hours(clock: Clock, tmp_path: Path) -> None:
    """A million samples of 10 tokens in 1000 s on 8 GPUs: 8000 GPU seconds of 0.001 EUR."""
    log = plant(tmp_path / "run", clock, 1000.0, **EIGHT, **PRICE) / "result_0.txt"
    known = costs(log)
    assert known["run_cost"] == ("EUR", pytest.approx(8.0))
    assert known["cost_per_million_tokens"] == ("EUR", pytest.approx(0.8))
    assert costs(plant(tmp_path / "free", clock, 1000.0, **EIGHT) / "result_0.txt") == {}
    on_cpus = EIGHT | PRICE | {"accelerator": "cpu"}
    assert costs(plant(tmp_path / "cpu", clock, 1000.0, **on_cpus) / "result_0.txt") == {}, "no GPUs, no GPU hours"


def test_costs_are_shown_by_parse_and_report(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant(tmp_path / "run", clock, 1000.0, **EIGHT, **PRICE)

    def shown(*argv: str) -> str:
        with pytest.raises(SystemExit):
            cli.main(list(argv))
        return capsys.readouterr().out

    assert "cost of the run (EUR): 8.00  GPU hours" in shown("parse", str(folder / "result_0.txt"))
    (row,) = answers.read(shown("report", str(folder), "--json"))
    assert row["run_cost"] == pytest.approx(8.0) and row["currency"] == "EUR"
    free = plant(tmp_path / "free", clock, 1000.0, **EIGHT)
    rows = report.trial_rows(sets.load([free, folder], num_gpus=None))
    assert [row["run_cost"] for row in rows] == [None, pytest.approx(8.0)]
    assert "run_cost" not in report.trial_rows(sets.load([free], num_gpus=None))[0]


@pytest.mark.long
def test_a_page_has_a_card_for_each_cost(clock: Clock, tmp_path: Path) -> None:
    plant(tmp_path / "run", clock, 1000.0, 1000.0, **EIGHT, **PRICE)
    text = report.write(sets.load([tmp_path / "run"], num_gpus=None), tmp_path / "page").read_text()
    assert "cost of a million tokens" in text and "median of 2 trials" in text and ">8.00<" in text


def test_a_generation_trial_costs_its_time(tmp_path: Path) -> None:
    """7750 tokens in 77.5 s on 8 GPUs are 100 tokens/s: 10,000 s and 80,000 GPU seconds for a million."""
    plan = compose.compose(["task=generate_7b", "cluster=dgx1"])
    log = answers_log.write(plan, tmp_path / "result_0.txt", answers_log.rows(plan), run_s=77.5)
    lines = log.read_text().splitlines()
    (ranks,) = [line for line in lines if '"num_ranks"' in line]
    record = json.loads(ranks.partition("MLLOG ")[2])
    priced = [f":::MLLOG {json.dumps(record | {'key': key, 'value': value})}" for key, value in PRICE.items()]
    place = lines.index(ranks)
    log.write_text("\n".join([*lines[: place + 1], *priced, *lines[place + 1 :]]) + "\n")
    num_gpus, per_s = record["value"], 0.001
    known = costs(log)
    assert known["run_cost"] == ("EUR", pytest.approx(77.5 * num_gpus * per_s))
    assert known["cost_per_million_tokens"] == ("EUR", pytest.approx(1e4 * num_gpus * per_s))


def test_another_price_is_another_fact_and_not_another_history(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, named = tmp_path / "runs", EIGHT | {"config_filename": "task/lora_8b.yaml"}
    for number, price in enumerate((3.6, 3.6, 7.2)):
        plant(root / f"run{number}", clock, 1000.0, **named, **PRICE | {"price_per_gpu_hour": price})
    with pytest.raises(SystemExit):
        cli.main(["history", "lora_8b", "--measurement", "run_cost"])
    shown = capsys.readouterr().out
    assert shown.count("lora_8b on") == 1 and "run_cost (EUR), lower is better" in shown
    assert "price of a GPU hour (EUR) 3.6 → 7.2" in shown
    pair = compare.compare_runs(root / "run0", root / "run2", measurement="run_cost")
    assert pair.comparison.first == pytest.approx((8.0,)) and pair.comparison.second == pytest.approx((16.0,))
    assert ("price of a GPU hour (EUR)", "3.6", "7.2") in pair.differences


@given(
    seconds=st.floats(0.1, 1e7), rate=st.floats(0.1, 1e6), price=st.floats(0.01, 100), num_gpus=st.integers(1, 10_000)
)
def test_costs_are_gpu_hours_x_price(seconds: float, rate: float, price: float, num_gpus: int) -> None:
    settings = {"price_per_gpu_hour": price, "currency": "USD"}
    result = dataclasses.replace(PARSED, num_gpus=num_gpus, hyperparameters=settings)
    measured = [
        Measurement(name="run_time", unit="min", value=seconds / 60),
        Measurement(name="epoch_time", unit="s", value=seconds),
        Measurement(name="throughput_per_gpu", unit="tokens/s/GPU", value=rate),
        Measurement(name="poisson 2 output_throughput", unit="tokens/s", value=rate * num_gpus),
    ]
    run, epoch, tokens, load = (one.value for one in of_measured(measured, result))
    assert run == pytest.approx(seconds / 3600 * num_gpus * price) and epoch == pytest.approx(run)
    assert tokens == pytest.approx(1e6 / rate / 3600 * price), "the number of GPUs does not matter"
    assert load == pytest.approx(tokens)


PARSED = parse(Path(__file__).parents[2] / "docs/results/2026-11-23-kubernetes-overhead/runner.1/result_0.txt")


def test_a_study_plans_costs_in_one_currency() -> None:
    """100 steps of 36 s on 8 ranks are 8 GPU hours."""
    planned = {"step_time_ms": 36_000.0, "steps": 100, "num_ranks": 8, "price_per_gpu_hour": 2.5, "currency": "USD"}
    arms = [PlannedArm(name="a", **planned), PlannedArm(name="b")]  # type: ignore[arg-type]
    sheet = study_sheets.plan_sheet("mine", arms, [("a", "b"), ("b", "a")])
    place = list(sheet.columns).index("cost (USD)")
    assert [row[place] for row in sheet.rows] == ["20.00", ""]
    assert "16.00 GPU-hours in total, 40.00 USD" in sheet.caption
    euros = dataclasses.replace(arms[0], name="c", currency="EUR")
    assert not any("cost" in column for column in study_sheets.plan_sheet("mine", [*arms, euros], []).columns)
    assert not any("cost" in column for column in study_sheets.plan_sheet("mine", arms[1:], []).columns)
