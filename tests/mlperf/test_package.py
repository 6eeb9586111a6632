"""Test that ten valid logs become a submission that MLPerf's own checkers pass, and that other logs are refused."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlperf_logging.compliance_checker import mlp_compliance

from bench import cli, masking
from bench.console import result as package_sheets
from bench.contract import node_facts, plan_kinds
from bench.errors import BenchError, ConfigError
from bench.mlperf import package
from bench.mlperf.package import checkers, system
from bench.mlperf.package.entry import require_name
from bench.mlperf.system_fields import COUNTS, FIELDS, NEEDED
from bench.planning import compose
from helpers import answers, facts, failing_disk
from helpers.paths import CORPUS
from helpers.types import MakeLog

MakeRun = Callable[..., Path]
SMC = CORPUS / "v4.0/smc/1xSMC-H100-SXM-80GB/llama2_70b_lora"
LOSSES = (0.95, 0.94, 0.93, 0.929, 0.92)
"""3072 samples: a little faster than the reference, so scores are scaled."""


@pytest.fixture
def make_run(written_log: MakeLog, tmp_path: Path) -> MakeRun:
    """Write a run folder of logs with different seeds; `last` changes the last log only."""

    def make(
        name: str = "run", *, logs: int = 10, seed: int = 1, last: dict[str, object] | None = None, **changes: object
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for k in range(logs):
            more = (last or {}) if k == logs - 1 else {}
            log = written_log(**{"evals": LOSSES, "seed": seed + k, **changes, **more})
            log.rename(folder / f"result_{k}.txt")
        return folder

    return make


def request(*runs: Path, **changes: object) -> package.Request:
    """Return a request for a package next to the runs; its system is described."""
    options: dict[str, Any] = {"folder": runs[0].parent / "package", "org": "example", "system": "box"} | changes
    if options["system"] == "box" and "descriptions" not in changes:
        options["descriptions"] = (described(runs[0].parent.parent, NEEDED[4:]),)
    return package.Request(runs=runs, **options)


def described(folder: Path, fields: Sequence[str], name: str = "box") -> Path:
    """Write a description of a system with these fields."""
    file = folder / f"described_{len(fields)}" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    counts = dict.fromkeys((field for field in COUNTS if field in fields), "1")
    file.write_text(json.dumps(dict.fromkeys(fields, "example") | counts))
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.skipif(not SMC.is_dir(), reason="no public results here")
def test_a_published_submission_passes_and_is_scaled_as_published(tmp_path: Path) -> None:
    before = contents(SMC)
    by_hand = (described(tmp_path, ("host_networking", "host_networking_topology", "host_memory_configuration")),)
    packed = package.pack(request(SMC, folder=tmp_path / "package", org="smc", ruleset="4.0.0", descriptions=by_hand))
    assert packed.passed
    assert {name: check.passed for name, check in packed.checked.checks.items()} == dict.fromkeys(
        ("system_description", "package", "repository"), True
    )
    results = tmp_path / "package/smc/results/box/llama2_70b_lora"
    assert json.loads((results / "scaling.json").read_text())["scaling_factor"] == pytest.approx(1.0347222, abs=1e-7)
    numeric = sorted(before, key=lambda name: [int(part) for part in name[7:-4].replace("-", "_").split("_")])
    assert [(results / f"result_{n}.txt").read_bytes() for n in range(10)] == [before[name] for name in numeric]
    assert contents(SMC) == before
    smc = json.loads((tmp_path / "package/smc/systems/box.json").read_text())
    assert (smc["accelerators_per_node"], smc["status"]) == ("8", "Available on-premise")
    assert smc["other_software_stack"].startswith("cuda_version 12.4")


@pytest.mark.long
@pytest.mark.parametrize("ruleset", ["5.1.0", "6.1.0"])
def test_our_logs_pass_on_the_command_line(
    make_run: MakeRun, tmp_path: Path, ruleset: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of the checkers is captured, and no log handler remains."""
    runs = [make_run("first", logs=4), make_run("second", logs=6, seed=50)]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    out = tmp_path / "new" / "package"
    with pytest.raises(SystemExit, match="^0$"):
        by_hand = described(tmp_path, NEEDED[4:], "1xexample")
        command = ["pack", *map(str, runs), "-o", str(out), "--org", "example", "--describe", str(by_hand)]
        cli.main([*command, "--ruleset", ruleset, "--json"])
    printed, warned = capfd.readouterr()
    packed = answers.one(printed)
    assert (warned, logging.getLogger().handlers) == ("", [])
    assert packed["passed"] and packed["findings"] == [] and packed["systems"] == ["1xexample"]
    assert packed["files"] == sorted(contents(out))
    assert packed["scaling_factors"] == {"results/1xexample/llama2_70b_lora/scaling.json": pytest.approx(1.0347222)}
    packed_logs = [out / f"example/results/1xexample/llama2_70b_lora/result_{k}.txt" for k in range(10)]
    logs = [run / f"result_{k}.txt" for run, count in zip(runs, (4, 6), strict=True) for k in range(count)]
    assert [path.read_bytes() for path in packed_logs] == [path.read_bytes() for path in logs]
    assert not [field for field in packed["todo"] if field.startswith("systems/")]
    assert "run_and_time.sh" in (out / "TODO.md").read_text()


@pytest.mark.long
def test_a_run_of_ours_describes_its_system_and_its_commands(make_run: MakeRun) -> None:
    run = make_run(software={"torch": "2.13.0", "megatron_core": "0.16.1"}, submission_status="cloud")
    (run / "plan.json").write_text(plan_kinds.dumps(compose.compose(["task=lora70b", "cluster=dgx2", "trials=10"])))
    (run / "config.yaml").write_text("task: lora70b\n")
    by_hand = run.parent / "box.json"
    by_hand.write_text(json.dumps({"cooling": "air", "host_processors_per_node": 2}))
    packed = package.pack(request(run, descriptions=(by_hand,), force=True))
    folder = run.parent / "package/example"
    written = json.loads((folder / "systems/box.json").read_text())
    known = {
        "submitter": "example",
        "division": "closed",
        "status": "Available cloud",
        "system_name": "box",
        "number_of_nodes": "2",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H100 SXM 80GB",
        "accelerator_memory_capacity": "79.6 GiB",
        "framework": "torch 2.13.0, megatron_core 0.16.1",
        "cooling": "air",
        "host_processors_per_node": "2",
        "operating_system": "",
    }
    assert written.items() >= known.items()
    (finding,) = packed.findings
    assert finding.rule == "PCK-10" and "operating_system" in finding.what and "cooling" not in finding.what
    assert "operating_system" in packed.todo["systems/box.json"] and "cooling" not in packed.todo["systems/box.json"]
    manual = folder / "benchmarks/llama2_70b_lora/implementations/box"
    assert "python -m jobs.tasks.train plan.json --trial 9\n" in (manual / "README.md").read_text()
    assert (manual / "run_0/plan.json").read_bytes() == (run / "plan.json").read_bytes()


@pytest.mark.long
def test_nodes_that_differ_are_refused_until_the_user_describes_them(make_run: MakeRun) -> None:
    run = make_run()
    (run / "facts").mkdir()
    for n, gib in enumerate((2015.0, 2009.0, 1007.0)):
        machine = replace(facts.MACHINE, memory_gib=gib)
        node = replace(facts.RANK, rank=n, node=f"dgx-{n}", machine=machine)
        (run / f"facts/rank_{n:04d}.json").write_text(node_facts.dumps(node))
    by_hand = (described(run.parent, [field for field in NEEDED[4:] if field != "host_memory_capacity"]),)
    what = r"PCK-12: .*host_memory_capacity is 2015 GiB \(dgx-0, dgx-1\); 1007 GiB \(dgx-2\)(?s:.*)--describe"
    with pytest.raises(ConfigError, match=what):
        package.pack(request(run, descriptions=by_hand))
    assert package.pack(request(run)).findings == ()


@pytest.mark.long
def test_one_failed_run_counts_as_the_slowest(make_run: MakeRun) -> None:
    packed = package.pack(request(make_run(last={"status": "aborted"})))
    assert packed.passed
    assert [(f.rule, f.severity) for f in packed.findings] == [("PCK-02", "warning"), ("PCK-11", "warning")]
    assert "one such run of a benchmark counts as the slowest" in packed.findings[1].fix
    assert "result_9.txt: LOG-05" in packed.findings[0].what


@pytest.mark.long
def test_a_seed_that_comes_twice_fails_the_official_checker(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(last={"seed": 1})
    by_hand = described(run.parent, NEEDED[4:], "1xexample")
    with pytest.raises(SystemExit, match="^2$"):
        cli.main(["pack", str(run), "-o", str(run.parent / "package"), "--org", "example", "--describe", str(by_hand)])
    printed = capsys.readouterr().err
    assert "PCK-11: MLPerf's package checker: Result file example/results/1xexample/llama2_70b_lora/result_9" in printed
    assert re.search(r"same seed(?s:.*)where: \S+/result_9.txt\n +fix: +run this trial again with another ", printed)
    assert not (run.parent / "package").exists()


@pytest.mark.long
def test_too_fast_convergence_can_be_packed_as_open(make_run: MakeRun) -> None:
    run = make_run(evals=(0.95, 0.92))
    with pytest.raises(ConfigError, match=r"PCK-11: .*RCP Test Failed(?s:.*)fix: .*--division open"):
        package.pack(request(run))
    closed = package.pack(request(run, force=True, folder=run.parent / "closed"))
    assert not closed.passed and not closed.checked.checks["package"].passed and not closed.checked.scaling
    moved = package.pack(request(run, folder=run.parent / "open", division="open"))
    assert moved.passed
    assert json.loads((run.parent / "open/example/systems/box.json").read_text())["division"] == "open"


def test_forced_package_is_marked_everywhere(make_run: MakeRun) -> None:
    run = make_run(logs=1, submission_org="example (tiny: not a submission)", submission_division="open")
    packed = package.pack(request(run, force=True))
    assert not packed.passed
    assert [f.rule for f in packed.findings][:3] == ["PCK-03", "PCK-01", "PCK-05"]
    assert {f.rule for f in packed.findings[3:]} == {"PCK-11"}
    assert "found 1, expected 10" in packed.checked.checks["package"].messages[0]
    texts = contents(run.parent / "package")
    for name in ("TODO.md", "example/benchmarks/llama2_70b_lora/implementations/box/README.md"):
        assert b"Not for submission" in texts[name] and b"PCK-03" in texts[name]
    assert any("cannot be submitted" in row for row in package_sheets.package_sheet(packed).rows)


@pytest.mark.parametrize(
    ("logs", "changes", "message"),
    [
        ({"logs": 9}, {}, "PCK-01: .* has 9 runs, but the rules require 10"),
        ({"logs": 11}, {}, "PCK-01: .* has 11 runs"),
        ({"logs": 2, "status": "aborted"}, {}, "PCK-02: .*result_0.txt: LOG-05: .*(?s:.*)PCK-02: .*result_1.txt"),
        ({"logs": 1, "submission_platform": "x (tiny: not a submission)"}, {}, "PCK-03: the task of these logs is not"),
        ({"logs": 2, "last": {"submission_platform": "2xother"}}, {}, "PCK-04: .*'1xexample', '2xother'"),
        (
            {"logs": 2, "last": {"global_batch_size": 16}}, {},
            "PCK-04: .*the runs have different values of global_batch_size: 16, 8",
        ),
        (
            {"logs": 2, "last": {"opt_base_learning_rate": 5e-4}}, {},
            "PCK-04: .*opt_base_learning_rate: 0.0004, 0.0005",
        ),
        (
            {"logs": 2, "last": {"submission_benchmark": "bert"}}, {},
            "logs of several benchmarks: 'bert', 'llama2_70b_lora'",
        ),
        (
            {"logs": 1, "submission_benchmark": "../x"}, {"force": True},
            r"submission_benchmark is '\.\./x', which is not a benchmark of ruleset 6.1.0",
        ),
        ({"logs": 1, "submission_benchmark": None}, {"force": True}, "submission_benchmark is None"),
        ({"logs": 1, "submission_platform": "../x"}, {"system": None}, "submission_platform '../x' is not a valid"),
        ({"logs": 1}, {"org": "-rf"}, "--org '-rf' is not a valid file name"),
        ({"logs": 1}, {"system": "a/../b"}, "--system 'a/../b' is not a valid file name"),
        ({"logs": 1}, {"ruleset": "5.2.0"}, "the ruleset '5.2.0' does not exist"),
        (
            {"logs": 2, "last": {"submission_division": "open"}}, {"force": True},
            "but the logs have 'closed', 'open'",
        ),
        ({"logs": 1, "submission_division": "open"}, {"division": "closed", "force": True}, "--division is closed"),
        ({"logs": 1, "config_filename": "hf_" + "a" * 30}, {"force": True}, "seems to contain a secret"),
        ({"logs": 1}, {"runs": ("run", "run")}, "listed twice"),
        ({"logs": 1}, {"runs": ("elsewhere",)}, "the folder has no result_K.txt"),
        ({"logs": 1}, {"folder": "run"}, "exists and is not empty"),
        ({"logs": 1}, {"folder": "run/package"}, "cannot be inside a run folder"),
    ],
)  # fmt: skip
def test_refused_package_writes_nothing(
    make_run: MakeRun, tmp_path: Path, logs: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    make_run(**logs)
    before, changes = contents(tmp_path), dict(changes)
    runs = [tmp_path / name for name in changes.pop("runs", ["run"])]
    folder = tmp_path / changes.pop("folder", "package")
    with pytest.raises(ConfigError, match=message):
        package.pack(request(*runs, folder=folder, **changes))
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_setting_with_a_secret_is_not_published(make_run: MakeRun) -> None:
    run = make_run(logs=1)
    (run / "config.yaml").write_text("tokens_per_step: 12345678\nwandb_api_key: 0123456789abcdef\n")
    message = r"seems to contain a secret: a value of wandb_api_key .*\n  where: .*config.yaml:2"
    with pytest.raises(ConfigError, match=message) as refusal:
        package.pack(request(run, force=True))
    assert "0123" not in str(refusal.value)


@pytest.mark.parametrize(
    "secret",
    [
        "-----BEGIN OPENSSH PRIVATE " + "KEY-----",
        "-----BEGIN PRIVATE " + "KEY-----",
        *(
            f"{start}{'a1B2' * 6}"
            for start in ("nvapi-", "hf_", "ghp_", "ghs_", "github_pat_", "glpat-", "xoxb-", "sk-")
        ),
        *(f"{start}{'a1B2' * 6}" for start in ("dckr_pat_", "gho_", "ghu_", "ghr_", "xoxa-", "xoxp-")),
        "AKIA" + "ABCD1234" * 2,
        "eyJ" + "a" * 10 + ".eyJ" + "b" * 10 + ".",
        "https://user:" + "pass@host",
        *(f"{name}={'x' * 8}" for name in ("PASSWORD", "passwd", "client_secret", "api_key", "apikey", "accesskey")),
        *(f'"{name}": "{"x" * 8}"' for name in ("auth_token", "hf_token", "access_token", "api_token")),
    ],
)
def test_every_shape_of_a_secret_is_known(secret: str) -> None:
    assert masking.first(f"value {secret}\n")


@pytest.mark.parametrize(
    "text",
    [
        "tokens_per_step: 12345678",
        "hf_token: $HF_TOKEN_FILE",
        "hf_short",
        "nvapi-short",
        "https://host:8080/path@x",
        "secret: null",
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_text_that_only_resembles_a_secret_is_packed(text: str) -> None:
    assert not masking.first(text)


@pytest.mark.long
def test_run_script_without_devices_describes_none(make_run: MakeRun) -> None:
    run = make_run(logs=1)
    recorded = {"number_of_nodes": "1", "accelerators_per_node": "1", "operating_system": "Ubuntu 24.04"}
    recorded |= dict.fromkeys(("accelerator_model_name", "accelerator_memory_capacity"), "No devices were found")
    log = run / "result_0.txt"
    log.write_text(f":::SYSJSON {json.dumps(recorded)}\n{log.read_text()}")
    package.pack(request(run, force=True, descriptions=()))
    system_of = json.loads((run.parent / "package/example/systems/box.json").read_text())
    assert system_of["operating_system"] == "Ubuntu 24.04"
    assert {system_of[field] for field in recorded if field != "operating_system"} == {""}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.json", "{}", "the runs use only these systems: box; the file other.json"),
        ("box.json", "[]", "not a JSON object"),
        ("box.json", '{"colour": "red"}', "unknown fields \\['colour'\\]"),
        ("box.json", "{", "cannot be read"),
    ],
)
def test_a_description_is_one_of_a_system_of_the_package(make_run: MakeRun, name: str, text: str, message: str) -> None:
    run = make_run(logs=1)
    path = run.parent / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        package.pack(request(run, force=True, descriptions=(path,)))


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[str, Path]:
    """A value that makes the checker read another rule file, and the file that the code in it creates."""
    proof = tmp_path / "proof"
    (tmp_path / "evil_common.yaml").write_text(f"- BEGIN:\n    CODE: \"open({str(proof)!r}, 'w').close()\"\n")
    rules = Path(mlp_compliance.__file__).parent / "training_5.1.0"
    return f"{os.path.relpath(tmp_path, rules)}/evil", proof


@pytest.mark.long
def test_no_checker_sees_a_hostile_log(make_run: MakeRun, hostile: tuple[str, Path], tmp_path: Path) -> None:
    """Our reader reads the division as open and the other record as malformed; the official parser reads both."""
    value, proof = hostile
    run = make_run(logs=1, submission_division="open")
    log = run / "result_0.txt"
    good = log.read_text()
    record = {"time_ms": 1, "event_type": "", "key": "submission_division", "value": value, "metadata": None}
    log.write_text(f":::MLLOG {json.dumps(record)}\n{good}")
    with pytest.raises(ConfigError, match="submission_division is '../"):
        package.pack(request(run, force=True))
    assert not proof.exists()

    shutil.copy(log, tmp_path / "hostile.txt")
    log.write_text(good)
    package.pack(request(run, force=True))
    submission = tmp_path / "package/example"
    shutil.copy(tmp_path / "hostile.txt", submission / "results/box/llama2_70b_lora/result_0.txt")
    checkers.check(submission, ruleset="5.1.0")
    assert proof.exists(), "or the attack is wrong, and the refusal proves nothing"
    assert mlp_compliance.enqueued_configs == []


def test_log_that_stops_the_checkers_is_reported(make_run: MakeRun) -> None:
    run = make_run(logs=1)
    log = run / "result_0.txt"
    log.write_text(log.read_text() + ":::MLLOG {}\n")
    with pytest.raises(ConfigError, match=r"official parser cannot read this log: KeyError.*\n  where: .*result_0.txt"):
        package.pack(request(run, force=True))


@pytest.mark.long
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_crash_leaves_no_partial_package(
    make_run: MakeRun, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    before, copy, copied = contents(tmp_path), shutil.copyfile, []

    def fail_late(source: Path, target: Path) -> Path:
        copied.append(source)
        if len(copied) == 5:
            raise error
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", fail_late)
    with pytest.raises((BenchError, KeyboardInterrupt)):
        package.pack(request(run))
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.long
def test_full_disk_leaves_no_partial_package(make_run: MakeRun, tmp_path: Path, monkeypatch: Any) -> None:
    run = make_run(logs=2)
    monkeypatch.setattr(checkers, "check", lambda submission, ruleset: checkers.Checked({}, {}))
    wanted = request(run, folder=tmp_path / "new" / "package", force=True)
    before, number = failing_disk.contents(tmp_path), 0
    while True:
        with failing_disk.failing(tmp_path, number) as disk:
            try:
                package.pack(wanted)
            except BenchError as error:
                assert "No space left" in str(error) and failing_disk.contents(tmp_path) == before, disk.failed
        if not disk.failed:
            break
        number += 1
    assert number > 12 and {"TODO.md", "checkers.txt"} <= contents(wanted.folder).keys()


@pytest.mark.long
def test_a_damaged_description_fails_the_official_checker(make_run: MakeRun) -> None:
    """It requires exactly the fields that we write, as text: a number stops it."""
    run = make_run(logs=1, submission_division="open")
    package.pack(request(run, force=True))
    submission = run.parent / "package/example"
    path = submission / "systems/box.json"
    whole = json.loads(path.read_text())

    def checked(fields: dict[str, object]) -> checkers.CheckerResult:
        path.write_text(json.dumps(fields))
        return checkers.check(submission, ruleset="5.1.0").checks["system_description"]

    assert checked(whole | {"status": system.STATUSES["onprem"]}).passed
    assert "Missing field cooling" in checked({k: v for k, v in whole.items() if k != "cooling"}).messages[0]
    assert "non valid value: sold" in checked(whole | {"status": "sold"}).messages[0]
    assert "official checker stopped: TypeError" in checked(whole | {"accelerators_per_node": 8}).messages[0]
    assert set(re.findall(r"Missing field ([\w-]+)", checked({}).messages[0])) == set(FIELDS)


@given(st.text(st.characters(max_codepoint=0x250), max_size=6) | st.sampled_from(["..", "a/b", "-o", "a..b", ".git"]))
def test_a_name_in_a_path_stays_in_its_folder(name: str) -> None:
    folder = Path("/submission")
    try:
        require_name(name, what="a name", fix="another")
    except ConfigError:
        return
    path = Path(os.path.normpath(folder / name))
    assert (path.parent, path.name) == (folder, name)
    assert name[0] not in "-." and " " not in name
