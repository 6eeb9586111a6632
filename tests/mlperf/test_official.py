"""The official checker judges our logs, and a hostile log cannot use it to run code."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
from mlperf_logging.rcp_checker import rcp_checker

from bench.contract.mllog import Binding, Writer
from bench.errors import ConfigError, LogError
from bench.mlperf import official
from bench.mlperf.official import RULESETS, official_verdict, ruleset_of
from bench.mlperf.package import checkers
from bench.mlperf.rcp import rcp_record, rcp_verdict
from helpers.paths import CORPUS
from helpers.types import MakeLog

ROOT = Path(mlp_compliance.__file__).parent
LORA = "llama2_70b_lora"


@pytest.fixture(autouse=True)
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed, whatever the log."""
    yield
    assert tuple(capfd.readouterr()) == ("", "")


def test_the_root_logger_stays_as_it_is(written_log: MakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root logger without handlers is given one by the first `logging.info`, and the checker calls that."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log = written_log()
    official_verdict(log, ruleset="6.1.0")
    rcp_verdict([log] * 3, benchmark=LORA, ruleset="6.1.0")
    rcp_record(LORA, 9, "6.1.0")
    assert root.handlers == []


@pytest.mark.parametrize("ruleset", RULESETS)
def test_our_log_passes(written_log: MakeLog, ruleset: str) -> None:
    verdict = official_verdict(written_log(), ruleset=ruleset)
    assert (verdict.ruleset, verdict.passed, verdict.messages) == (ruleset, True, ())


@pytest.mark.parametrize("ruleset", ["5.0.0", "5.1.0", "6.0.0", "6.1.0"])
def test_the_checker_does_not_mind_what_binds_a_log_to_its_run(
    written_log: MakeLog, tmp_path: Path, ruleset: str
) -> None:
    (tmp_path / "requests").write_text("0.1\n")
    log = written_log(
        binding=Binding(nonce="f" * 32, trial=0, attempt=1),
        attached=[tmp_path / "requests"],
        after={"gpu_telemetry": {"gpus": [{"gpu": 0, "power_w": {"median": 690.5, "max": 701.0}}]}},
    )
    assert all(key in log.read_text() for key in ("run_attempt", "attached_file", "log_sha256", "gpu_telemetry"))
    verdict = official_verdict(log, ruleset=ruleset)
    assert (verdict.passed, verdict.messages) == (True, ())


def test_a_key_of_any_type_is_left_to_the_referee(written_log: MakeLog) -> None:
    path = written_log()
    path.write_text(path.read_text() + ':::MLLOG {"time_ms":1,"key":[],"value":{},"metadata":{}}')
    assert official_verdict(path, ruleset="5.1.0").passed


def test_failures_come_back_as_messages(written_log: MakeLog) -> None:
    verdict = official_verdict(written_log(evals=(0.95, 0.93), lora_rank=8), ruleset="5.1.0")
    assert verdict.passed is False
    assert any("lora_rank" in message for message in verdict.messages)
    assert any("eval_accuracy" in message for message in verdict.messages)


def test_6_1_requires_more_keys_than_5_1(written_log: MakeLog) -> None:
    path = written_log(micro_batch_size=None)
    assert official_verdict(path, ruleset="5.1.0").passed
    assert "micro_batch_size" in official_verdict(path, ruleset="6.1.0").messages[0]


def test_no_benchmark_has_no_verdict(written_log: MakeLog) -> None:
    verdict = official_verdict(written_log(submission_benchmark=None), ruleset="6.1.0")
    assert verdict.passed is None
    assert "no submission_benchmark" in verdict.messages[0]


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[str, Path]:
    """A value that leads from the official rules to a rule file of a stranger, and the file that its code makes."""
    proof = tmp_path / "proof"
    (tmp_path / "evil_common.yaml").write_text(f"- BEGIN:\n    CODE: \"open({str(proof)!r}, 'w').close()\"\n")
    return f"{os.path.relpath(tmp_path, ROOT / 'training_6.1.0')}/evil", proof


@pytest.mark.parametrize("key", ["submission_division", "submission_benchmark"])
def test_a_hostile_log_runs_no_code(written_log: MakeLog, hostile: tuple[str, Path], key: str) -> None:
    value, proof = hostile
    verdict = official_verdict(written_log(**{key: value}), ruleset="6.1.0")
    assert verdict.passed is False
    assert f"{key} is '../" in verdict.messages[0]
    assert not proof.exists()


def test_the_plain_checker_does_run_the_code_of_a_hostile_log(
    written_log: MakeLog, hostile: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, the test above could pass because the attack is wrong."""
    value, proof = hostile
    silent = logging.getLogger("tests.silent")
    monkeypatch.setattr(silent, "disabled", True)
    monkeypatch.setattr(mlp_compliance, "logging", silent)
    checker = mlp_compliance.make_checker("training", "6.1.0", quiet=True, werror=False)
    mlp_compliance.main(str(written_log(submission_division=value)), "training_6.1.0/common.yaml", checker)
    assert proof.exists()


@pytest.mark.parametrize("value", ["common", "bert", 7, ["llama2_70b_lora"], None, {"a": 1}])
def test_a_benchmark_without_rules_is_refused(written_log: MakeLog, tmp_path: Path, value: object) -> None:
    path = written_log(submission_benchmark=None)
    with Writer(tmp_path / "more") as log:
        log.event("submission_benchmark", value)
    path.write_bytes(path.read_bytes() + (tmp_path / "more").read_bytes())
    verdict = official_verdict(path, ruleset="6.1.0")
    assert verdict.passed is False
    assert "submission_benchmark is" in verdict.messages[0]


LONG_RECORD = ':::MLLOG {"value": ' + "[" * 250_000


def test_record_that_takes_the_checkers_minutes_is_refused(
    written_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No official parser reads it."""
    path = written_log()
    path.write_text(f"{path.read_text()}{LONG_RECORD}\n")
    last = path.read_text().count("\n")

    def never(*args: object, **named: object) -> None:
        raise AssertionError("it would take minutes")

    monkeypatch.setattr(mlp_parser, "parse_file", never)
    monkeypatch.setattr(rcp_checker, "get_submission_epochs", never)
    verdict = official_verdict(path, ruleset="6.1.0")
    refusal = f"the official parser would need minutes for this log: line {last} has 250,019 characters"
    assert (verdict.passed, verdict.messages) == (False, (refusal,))
    assert rcp_verdict([path] * 3, benchmark=LORA, ruleset="6.1.0").message == refusal
    with pytest.raises(ConfigError, match="would need minutes"):
        checkers.require_safe(path, LORA, "6.1.0")


@pytest.mark.long
def test_long_lines_of_other_output_and_long_records_are_checked(written_log: MakeLog) -> None:
    """A progress bar of a megabyte before a record, and a record of step times that is thirty times the usual one."""
    path = written_log()
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{'.' * 1_000_000}{first}\n{rest}")
    with Writer(path.with_name("more")) as log:
        log.event("tracked_stats", {"step_times": [2.5] * 2000}, samples_count=8)
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:-3], path.with_name("more").read_text(), *text[-3:]]))
    verdict = official_verdict(path, ruleset="5.1.0")
    assert (verdict.passed, verdict.messages) == (True, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (":::MLLOG {}", "official parser cannot read this log: KeyError"),
        (":::MLLOG []", "official parser cannot read"),
        (":::MLLOG {", "parsing error"),
        (
            ':::MLLOG {"time_ms":1,"key":"eval_accuracy","value":null,"metadata":{}}',
            "official checker stopped: TypeError",
        ),
    ],
)
def test_record_that_stops_the_checker_is_a_failure(written_log: MakeLog, line: str, message: str) -> None:
    path = written_log()
    good = path.read_bytes()
    path.write_bytes(good + line.encode())
    verdict = official_verdict(path, ruleset="5.1.0")
    assert verdict.passed is False
    assert any(message in text for text in verdict.messages)
    assert mlp_compliance.enqueued_configs == []
    path.write_bytes(good)
    assert official_verdict(path, ruleset="5.1.0").passed


def test_missing_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file"):
        official_verdict(tmp_path / "absent", ruleset="6.1.0")


def test_an_unknown_ruleset_is_a_bad_request(written_log: MakeLog) -> None:
    for ruleset in ("7.7.7", "../training_5.1.0", ""):
        with pytest.raises(ConfigError, match="the ruleset .* does not exist"):
            official_verdict(written_log(name=ruleset.replace("/", "_") + "x"), ruleset=ruleset)
        with pytest.raises(ConfigError, match="the ruleset .* does not exist"):
            rcp_verdict([], benchmark=LORA, ruleset=ruleset)


@pytest.mark.long
def test_rule_files_are_read_once_and_never_changed(
    written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unchanged checker reads them again for every log, with the same verdict."""
    good, bad = written_log(), written_log(name="bad", lora_rank=8, evals=(0.95,))
    silent = logging.getLogger("tests.silent")
    monkeypatch.setattr(silent, "disabled", True)
    for log in (good, bad, good, bad):
        cached = official_verdict(log, ruleset="6.1.0")
        with monkeypatch.context() as patch:
            patch.setattr(mlp_compliance, "logging", silent)
            plain = mlp_compliance.make_checker("training", "6.1.0", quiet=False, werror=False)
            assert plain.check_file(str(log), "training_6.1.0/common.yaml") == cached.passed == (log is good)
        assert cached.messages == (*plain.not_overwritable, *plain.overwritable.values(), *plain.warnings.values())
    for path in ROOT.glob(f"training_6.1.0/closed_{LORA}.yaml"):
        kept = official._rules(str(path))
        official._rules.cache_clear()
        assert official._rules(str(path)) == kept


@pytest.mark.parametrize(
    ("day", "ruleset"),
    [
        (-(10**12), "3.1.0"),
        (1_695_141_980_000, "3.1.0"),
        (1_695_417_060_000, "4.0.0"),
        (1_715_874_513_000, "4.0.0"),
        (1_726_852_844_000, "4.1.0"),
        (1_745_267_298_000, "5.0.0"),
        (1_757_519_007_000, "5.1.0"),
        (1_778_303_281_000, "6.0.0"),
        (1_795_219_200_000, "6.1.0"),
        (10**18, "6.1.0"),
    ],
)
def test_a_run_is_judged_by_the_rules_of_its_time(day: int, ruleset: str) -> None:
    assert ruleset_of(day) == ruleset
    official.require_ruleset(ruleset)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not here")
def test_a_published_run_is_judged_by_the_rules_of_its_round() -> None:
    dated = [record for record in json.loads((CORPUS / "truth.json").read_text()) if "run_start_ms" in record]
    assert len(dated) == 70
    for record in dated:
        assert f"v{ruleset_of(record['run_start_ms'])}" == record["file"].split("/")[0] + ".0", record["file"]
