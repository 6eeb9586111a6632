"""The rows of a serving plan, the verdict of a trial as tables and as JSON."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Device
from bench.planning import compose
from bench.report import serving as sheets
from bench.report.kinds import ShownTrial
from bench.results import kind as trial_results
from bench.results.serving import ServingResult
from helpers import answers, serving, serving_log

ARGV = ("task.serving.server.argv=[serve,'{model}','{port}']", "task.serving.server.batches_tokens=false")
BURST = (*ARGV, "task.serving.arrivals=[burst]", "task.serving.rates=[]")
SWEEP = (*ARGV, "task.serving.arrivals=[poisson]", "task.serving.rates=[1,2]")


MEMORY = "0.1 GiB (estimate): weights 0.0, workspace 0.0, KV cache 0.1 for 2,000 concurrent requests"


def written(path: Path, latency_s: dict[str, list[float | None]], *words: str, **changed: Any) -> Path:
    return serving_log.write(serving.planned(*words), path, latency_s, **changed)


def trial(path: Path) -> ShownTrial[ServingResult]:
    judged = trial_results.read(path)
    assert isinstance(judged.of_kind, ServingResult)
    return ShownTrial("0", judged)


def verdict(path: Path) -> dict[str, tuple[str, ...]]:
    table, _ = sheets.REPORT.tables(trial(path), more=[("more", "1", "")])
    assert table.caption == "n = 1 run" and table.rows[-1] == ("more", "1", "")
    return {row[0]: tuple(row[1:]) for row in table.rows}


def test_a_plan_in_words(tmp_path: Path) -> None:
    words = ("task.serving.arrivals=[burst,poisson]", "task.serving.rates=[0.5]", "task.serving.requests=2000")
    plan = serving.planned(*ARGV, *words, "task.serving.limits={ttft_s:2,tpot_s:null,latency_s:30}")
    assert sheets.plan_rows(plan) == [
        ("server", "transformers: serve {model} {port} --dtype float32 --cb-num-blocks 64 --cb-max-batch-tokens 256"),
        ("model", "tiny, random weights; fp32, tp 1 on cpu"),
        ("loads", "burst (Offline); poisson 0.5/s (Server)"),
        ("requests", "2,000 per load: 32 input and 8 output tokens each"),
        ("limits", "TTFT 2 s, latency 30 s"),
        ("memory of the server", MEMORY),
    ]
    cluster = dataclasses.replace(plan.config.cluster, device=Device.cuda)
    on_gpus = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cluster=cluster), base_dir="/m/llama")
    shown = dict(sheets.plan_rows(on_gpus))
    assert shown["server"] == "transformers: serve {model} {port} --dtype float32"
    assert shown["model"] == "tiny, /m/llama; fp32, tp 1 on cuda"


def test_plan_for_a_remote_server_has_no_model_rows(tmp_path: Path) -> None:
    plan = serving.planned(*BURST, *serving.elsewhere("http://node7:8000", tmp_path))
    shown = dict(sheets.plan_rows(plan))
    assert (shown["server"], shown["model"]) == ("transformers at http://node7:8000", "tiny")
    assert shown["limits"] == "latency 30 s" and "memory of the server" not in shown
    without = serving.planned(*BURST, "task.serving.limits.latency_s=null")
    assert dict(sheets.plan_rows(without))["limits"] == "none"


@pytest.mark.long
def test_a_plan_for_gpus_has_the_memory_of_a_gpu() -> None:
    words = ("task=serve_70b", "cluster=dgx1", "container=none", "server=vllm", "model.weights=random")
    plan = compose.compose([*words, "gpu@cluster.gpu=rtx4090"])
    assert isinstance(plan, ServingPlan)
    assert dict(sheets.plan_rows(plan))["memory per GPU"] == (
        "21.3 GiB of 23.65, of which the server uses 90 % (estimate): weights 16.1, workspace 2.5, KV cache 2.7 for "
        "122 of 1,000 concurrent requests; the others wait: all need 22.0"
    )


def test_trial_has_a_verdict_and_reasons(tmp_path: Path) -> None:
    shown = verdict(written(tmp_path / "a", {"burst": [1.0] * 200}, *BURST))
    assert shown["server"] == ("transformers", "fp32, tp 1, random weights")
    assert shown["loads measured"] == ("1 of 1", "") and "knee (requests/s)" not in shown
    assert shown["valid trial"] == ("yes", "") and shown["server ready after (s)"] == ("9.5", sheets.UNTIMED)
    assert shown["peak GPU memory"] == ("-", "the server runs on CPUs")
    shown_trial = trial(tmp_path / "a")
    result = shown_trial.kind_result
    on_gpu = dataclasses.replace(result, memory_gib=70.25, healthy_s=None, findings=result.findings * 2)
    judged = dataclasses.replace(shown_trial.judged, of_kind=on_gpu)
    table, _ = sheets.REPORT.tables(ShownTrial("0", judged))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["peak GPU memory"] == ("70.2 GiB", "highest of all GPUs") and "server ready after (s)" not in rows


def test_the_knee_has_its_rate_or_why_there_is_none(tmp_path: Path) -> None:
    knee: dict[str, list[float | None]] = {"poisson 1/s": [1.0, 1.0], "poisson 2/s": [31.0, 31.0]}
    name = "knee (requests/s)"
    assert verdict(written(tmp_path / "a", knee, *SWEEP))[name] == ("1", sheets.KNEE)
    shown = verdict(written(tmp_path / "b", knee | {"poisson 2/s": [1.0, 1.0]}, *SWEEP))
    assert shown[name] == ("-", "the limits are met at every rate: add higher values to task.serving.rates")


def test_of_many_problems_five_are_listed(tmp_path: Path) -> None:
    rates = f"task.serving.rates=[{','.join(str(n) for n in range(1, 8))}]"
    names = [f"poisson {n}/s" for n in range(1, 8)]
    for missing, more in ((5, ""), (7, "; 2 more")):
        path = tmp_path / str(missing)
        loads: dict[str, list[float | None]] = {name: [1.0] for name in names}
        shown = verdict(written(path, loads, *SWEEP, rates, without=names[7 - missing :]))
        listed = "; ".join(f"{name} was not measured" for name in names[7 - missing :][:5])
        assert shown["valid trial"] == ("no", listed + more)
        assert shown["loads measured"] == (f"{7 - missing} of 7", "")


def test_dashes_in_the_loads_table_have_one_reason_each(tmp_path: Path) -> None:
    """One note for all loads, and one for the load whose slowest request failed."""
    loads: dict[str, list[float | None]] = {"poisson 1/s": [0.5, 250.0], "poisson 2/s": [0.25, None]}
    words = (*SWEEP, "task.serving.limits={ttft_s:null,tpot_s:null,latency_s:30}")
    loadgen = {"result_validity": "INVALID", "early_stopping_result": "too few"}
    _, table = sheets.REPORT.tables(trial(written(tmp_path / "a", loads, *words, together=0.4, loadgen=loadgen)))
    first, second = table.rows
    assert first[:7] == ("poisson 1/s", "2", "0", "0.0637", "0.00797", "0.00398", "0.5")
    assert first[7:] == ("250.0", "250.0", "250.0", *"----", "INVALID", "0.2 %")
    assert second[1:7] == ("2", "1", "32", "4", "4", "0.25") and second[7:14] == tuple("-------")
    notes = table.caption.splitlines()[1:]
    assert notes == [
        "every load: INVALID by loadgen: too few.",
        "every load: no TTFT and TPOT: 40 % of the chunks arrived together with the previous one.",
        "poisson 2/s: a percentile is - if it falls on a failed request.",
    ]


def test_cells_have_significant_digits_and_percentiles(tmp_path: Path) -> None:
    """200 requests take 0.5 s to 100 s; 125 answers of 8 tokens in a second are 1,000 tokens/s."""
    even: dict[str, list[float | None]] = {"burst": [(n + 1) / 2 for n in range(200)]}
    _, table = sheets.REPORT.tables(trial(written(tmp_path / "a", even, *BURST)))
    ((*_, p50, p90, p99, p100, ttft_p50, ttft_p99, tpot_p50, tpot_p99, validity, share),) = table.rows
    assert (p50, p90, p99, p100) == ("50", "90", "99", "100.0") and table.num_optional == 2
    assert (ttft_p50, ttft_p99) == ("12.5", "24.8") and (tpot_p50, tpot_p99) == ("5357.1", "10607.1")
    assert (validity, share) == ("VALID", "0.0 %") and len(table.caption.splitlines()) == 1
    quick: dict[str, list[float | None]] = {"burst": [1.0] * 125}
    _, table = sheets.REPORT.tables(trial(written(tmp_path / "b", quick, *BURST, client={})))
    assert table.rows[0][:6] == ("burst", "125", "0", "1,000", "125", "125") and table.rows[0][-1] == "-"


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "latency_s", "changed", "why"),
    [
        ("latency_s:null", 1.0, {}, "no latency limit is set"),
        (
            "ttft_s:1,latency_s:null",
            1.0,
            {"together": 0.4},
            "40 % of the chunks arrived together with the previous one",
        ),
        (
            "tpot_s:1,latency_s:null",
            1.0,
            {"together": 0.4},
            "40 % of the chunks arrived together with the previous one",
        ),
        ("latency_s:30", None, {}, "no request succeeded"),
    ],
)
def test_missing_goodput_has_a_reason(
    tmp_path: Path, limits: str, latency_s: float | None, changed: dict[str, Any], why: str
) -> None:
    words = (*BURST, f"task.serving.limits={{{limits}}}")
    _, table = sheets.REPORT.tables(trial(written(tmp_path / "a", {"burst": [latency_s]}, *words, **changed)))
    assert table.rows[0][5] == "-" and table.caption.splitlines()[-1] == f"burst: no goodput: {why}."


def test_loads_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loadgen = {"result_validity": "INVALID", "early_stopping_result": "too few"}
    failed: list[float | None] = [1.0, None]
    log = written(tmp_path / "result_0.txt", {"burst": failed}, *BURST, loadgen=loadgen)
    with pytest.raises(SystemExit) as ended:
        cli.main(["parse", "--json", str(log)])
    record = answers.one(capsys.readouterr().out)
    assert (ended.value.code, record["valid"], record["file"], record["kind"]) == (1, False, str(log), "serve")
    assert (
        record["problems"] == ["SRV-04: burst: 1 of 2 requests failed: timeout (1)"] and record["status"] == "success"
    )
    assert record["loads"] == [{"load": "burst", "loadgen": "INVALID", "reason": "too few"}]
    named = {one["name"]: one["value"] for one in record["measurements"]}
    assert named["latency_p50"] == 1.0 and "latency_p99" not in named and record["time_to_train_min"] >= 0
