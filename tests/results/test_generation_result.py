"""Results of generation logs: times calculated by hand, and no result if answers do not match the requests."""

from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.contract import mllog
from bench.contract.plan_kinds import GenerationPlan
from bench.planning import compose
from bench.results import kind
from bench.results.generation import Answered
from bench.runs import trial as trials
from helpers import answers, answers_log

H200 = ("engine=huggingface", "cluster=dgxh200", "model.weights=random")


@pytest.fixture(scope="module")
def plan() -> GenerationPlan:
    """The 31 answers of the published report, one by one, on one GPU: 77.5 s at 10 ms per token."""
    one = ("cluster.ranks_per_node=1", "task.generation.order=one_by_one")
    planned = compose.compose(["task=generate_7b", *H200, *one])
    assert isinstance(planned, GenerationPlan)
    return planned


def test_times_are_those_of_the_document(plan: GenerationPlan, tmp_path: Path) -> None:
    """7,750 tokens in 77.5 s, in which a first token took 20 ms and the others of an answer of 100 tokens 980."""
    log = answers_log.write(plan, tmp_path / "result_0.txt", answers_log.rows(plan), run_s=77.5)
    measurements = {one.name: one for one in kind.read(log).of_kind.measurements}
    assert measurements["generation_time"].value == pytest.approx(77.5) and measurements["generation_time"].unit == "s"
    assert measurements["time_per_token"].value == pytest.approx(0.01)
    assert measurements["generation_throughput"].value == measurements["throughput_per_gpu"].value == pytest.approx(100)
    assert measurements["answer_time of 100 tokens"].value == pytest.approx(1.0)
    assert measurements["answer_time"].value == pytest.approx(2.5), "of the 16th of 31 lengths"
    assert measurements["time_to_first_token"].value == pytest.approx(0.02)
    assert plan.cost is not None
    token_s = 0.98 / 99, 3.98 / 399
    share = measurements["bandwidth_share"].value * plan.cost.bandwidth_gbs * 1e9 / plan.cost.bytes_per_token
    assert 1 / token_s[1] < share < 1 / token_s[0], "by the median of the tokens after the first"
    judged = trials.judge(log, plan, plan.trials[0])
    assert judged.valid and list(judged.differences) == []


@pytest.mark.parametrize(("tokens", "token_s"), [(1, None), (2, 3.0), (4, 1.0)])
def test_the_time_per_token_excludes_the_first_token(tokens: int, token_s: float | None) -> None:
    one = Answered(index=0, replica=0, prompt_tokens=9, tokens=tokens, start_s=0.5, first_s=2.0, done_s=5.0)
    assert one.token_s == token_s


def test_eight_gpus_answer_in_parallel(tmp_path: Path) -> None:
    planned = compose.compose(["task=generate_7b", *H200])
    assert isinstance(planned, GenerationPlan)
    rows = [[*row[:4], 0.0, *row[5:]] for row in answers_log.rows(planned)]
    log = answers_log.write(planned, tmp_path / "result_0.txt", rows, run_s=4.0)
    measurements = {one.name: one.value for one in kind.read(log).of_kind.measurements}
    assert measurements["generation_throughput"] == pytest.approx(1937.5)
    assert measurements["throughput_per_gpu"] == pytest.approx(1937.5 / 8)
    assert "bandwidth_share" not in measurements, "a step reads the weights for all answers of the batch"


def exit_code(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return ended.value.code


def changed(row: int, column: int, value: Any) -> Any:
    def change(rows: list[list[Any]]) -> list[list[Any]]:
        rows[row][column] = value
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed(3, 3, 129), "answer 3 has 129 tokens, but 130 were requested"),
        (changed(3, 3, 131), "answer 3 has 131 tokens, but 130 were requested"),
        (lambda rows: rows[:-1], "answer 30 is missing"),
        (changed(3, 0, 4), "the record of an answer is not valid"),
        (changed(3, 0, 31), "the record of an answer is not valid"),
        (changed(3, 5, 9.0), "the record of an answer is not valid"),
        (changed(3, 6, 0.0), "the record of an answer is not valid"),
        (changed(3, 4, -1.0), "the record of an answer is not valid"),
        (changed(30, 6, 5.0), "answer 30 ended at 78.500 s, after run_stop at 77.5"),
        (lambda rows: None, "the log has 0 records answers"),
    ],
)
def test_answers_that_do_not_match_the_requests_have_no_measurements(
    plan: GenerationPlan, tmp_path: Path, change: Any, problem: str
) -> None:
    rows = change(answers_log.rows(plan))
    log = answers_log.write(plan, tmp_path / "result_0.txt", rows, run_s=77.5)
    judged = trials.judge(log, plan, plan.trials[0])
    assert judged.of_kind is not None and not judged.valid
    assert any(problem in one for one in judged.of_kind.problems), judged.of_kind.problems
    assert kind.read(log).of_kind.measurements == ()


def test_a_log_with_other_settings_differs_from_the_plan(plan: GenerationPlan, tmp_path: Path) -> None:
    rows = answers_log.rows(plan)
    log = answers_log.write(plan, tmp_path / "result_0.txt", rows, run_s=77.5, weights="fp8", order="side_by_side")
    judged = trials.judge(log, plan, plan.trials[0])
    assert list(judged.differences) == [
        "weights is fp8 in the log, but bf16 in the plan",
        "order is side_by_side in the log, but one_by_one in the plan",
    ]
    assert not judged.valid


@pytest.mark.long
def test_parse_and_report_show_the_measurements(
    plan: GenerationPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    other = answers_log.write(plan, tmp_path / "other.txt", answers_log.rows(plan), run_s=77.5, **sampling)
    exit_code("parse", str(other))
    assert "temperature 0.8, top_k 20, top_p 0.9, prompts: random" in capsys.readouterr().out
    log = answers_log.write(plan, tmp_path / "result_0.txt", answers_log.rows(plan), run_s=77.5)
    assert exit_code("parse", str(log)) == 0
    shown = capsys.readouterr().out
    assert "engine: huggingface  ddp, static cache, compiled" in shown
    assert "throughput (tokens/s): 100" in shown and "answers of the requested length: 31 of 31" in shown
    assert "400\t1\t4\t0.02\t9.975\t100" in shown, "by length"
    assert exit_code("parse", "--json", str(log)) == 0
    about = answers.one(capsys.readouterr().out)
    assert (about["kind"], about["valid"]) == ("generate", True)
    assert exit_code("report", str(tmp_path), "-o", str(tmp_path / "page"), "--csv") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("trial,index,replica,prompt_tokens,tokens,start_s,") and len(rows) == 32
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"report.html", "answers.csv", "answers.png"}
    assert "answer_time" not in (page := (tmp_path / "page/report.html").read_text()) and "<td" in page


def test_options_of_training_logs_are_refused(
    plan: GenerationPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = answers_log.write(plan, tmp_path / "result_0.txt", answers_log.rows(plan), run_s=77.5)
    options = {"--official": "5.1.0", "--num-gpus": "8"}
    for option, value in options.items():
        assert exit_code("parse", str(log), option, value) == 1
        printed = capsys.readouterr()
        assert (
            f"{option} applies only to training logs, but this log is not a training log\n  where: {log}\n"
            in printed.err
        )
        assert printed.out == ""
    assert exit_code("report", str(tmp_path), "--num-gpus", "8") == 2
    assert "--num-gpus is only for training logs" in capsys.readouterr().err


def test_a_log_with_too_few_tokens_is_invalid(
    plan: GenerationPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = changed(3, 3, 129)(answers_log.rows(plan))
    log = answers_log.write(plan, tmp_path / "result_0.txt", rows, run_s=77.5)
    assert exit_code("parse", str(log)) == 1
    shown = capsys.readouterr().out
    assert "valid trial: no  answer 3 has 129 tokens" in shown and "throughput" not in shown
    assert mllog.ANSWERS in log.read_text()
