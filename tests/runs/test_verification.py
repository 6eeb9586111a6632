"""A copied run folder can be verified: every change in it is reported."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from bench.backends.slurm import script
from bench.contract import atomic_files, checksums, mllog, plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.images import store
from bench.planning import compose
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.status import Ending, Status
from bench.runs.verification import Verification, verify
from helpers.examples import in_proportion

MakeLog = Callable[..., Path]
SITE = {"DATADIR": "/lustre/data", "MODEL": "/lustre/model", "LOGDIR": "/lustre/logs", "CONT": "/lustre/image.sqsh"}
ADAPTERS, CHECKPOINT = "adapters_0/__0_0.distcp", "checkpoints/trial_0/step_8/__0_0.distcp"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compose.compose(["task=lora70b", "cluster=dgx1", "trials=2"])


@pytest.fixture
def run(tmp_path: Path, plan: Plan, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run under Slurm with two valid trials, one of which has attached a file."""
    monkeypatch.setattr(compose, "read", functools.cache(compose.read))  # which takes most of the time
    folder = tmp_path / "run"
    (folder / "facts").mkdir(parents=True)
    (folder / "adapters_0").mkdir()
    (folder / CHECKPOINT).parent.mkdir(parents=True)
    for name in ("facts/rank_0000.json", "health.json", "slurm-7.out", ADAPTERS, CHECKPOINT):
        (folder / name).write_text(f'"{name}"')
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(plan.config)))
    (folder / "job.sbatch").write_text(script.script(plan))
    text = plan_kinds.dumps(plan)
    for name in sorted(SITE, key=len, reverse=True):
        text = text.replace(f"${name}", SITE[name])
    (folder / "plan.json").write_text(text)
    ledger.create(folder, plan)
    for trial in plan.trials:
        ledger.begin(folder, trial, attempts=1, job="7")
        requests = folder / f"rank_logs/trial_{trial.index}.requests"
        requests.write_text("0.1\n")
        bound = mllog.load(folder, trial.index)
        written_log(name=f"run/{trial.log}", seed=trial.seed, binding=bound, attached=[requests][: 1 - trial.index])
        judged = trials.close(folder, plan, trial, failed=False)
        assert judged is not None and judged.valid
    checksums.write((folder / CHECKPOINT).parent, ["__0_0.distcp"])
    statuses.write(folder, Status(outcome=Ending.valid, exit_code=0))
    manifest.write(folder)
    return folder


def wrong(verification: Verification) -> dict[str, tuple[str | None, str]]:
    """Return the failed checks, with rule and actual value."""
    return {each.what: (each.rule, each.actual) for each in verification.compared if each.passed is False}


@pytest.mark.long
def test_a_copied_run_folder_is_verified(run: Path, tmp_path: Path) -> None:
    verified = verify(run)
    assert wrong(verified) == {} and verified.passed
    names = {each.what for each in verified.compared}
    files = {"config.yaml", "plan.json", "job.sbatch", "ledger.json", "status.json", "health.json", "result_1.txt"}
    assert files | {"facts/rank_0000.json", "rank_logs/trial_0.requests", ADAPTERS, CHECKPOINT} <= names
    assert not {"slurm-7.out", "rank_logs/trial_1.requests"} & names, "these are not part of the result"
    assert {"job.sbatch, its plan", "config.yaml, in the plan", "result_0.txt, its own checksums"} <= names
    shutil.copytree(run, tmp_path / "copy")
    copy = verify(tmp_path / "copy")
    assert copy.passed and [e.passed for e in copy.compared if "moved or copied since" in e.actual] == [None, None]


@pytest.mark.long
@settings(max_examples=in_proportion(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_reported_with_its_file(run: Path, data: st.DataObject) -> None:
    known = manifest.read(run)
    assert known is not None
    name = data.draw(st.sampled_from(["manifest.json", *known.files]))
    before = (run / name).read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    (run / name).write_bytes(before[:at] + bytes([before[at] ^ data.draw(st.integers(1, 255))]) + before[at + 1 :])
    try:
        assert name in wrong(verify(run))
    finally:
        (run / name).write_bytes(before)


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [(b'"written": "2', b'"written": "3'), (b'": ', b'":\t'), (b"}\n", b"}")])
def test_a_changed_byte_in_the_manifest_is_detected(run: Path, old: bytes, new: bytes) -> None:
    whole = (run / "manifest.json").read_bytes()
    (run / "manifest.json").write_bytes(whole.replace(old, new, 1) if old != b"}\n" else whole.rstrip())
    assert wrong(verify(run)) == {"manifest.json": (None, "changed since, or written by another version")}


@pytest.mark.long
def test_the_image_is_compared_on_its_machine(run: Path, tmp_path: Path) -> None:
    image = tmp_path / "train.sqsh"
    image.write_bytes(b"an image")
    atomic_files.write(run / "job.json", {"backend": "slurm", "jobs": [], "image": store.identity(str(image))})
    manifest.write(run)
    assert verify(run).passed
    image.write_bytes(b"another image")
    assert wrong(verify(run)) == {f"image {image}": (None, "another file")}
    image.unlink()
    assert verify(run).passed, "on other machines there is no image to compare"


@pytest.mark.long
@pytest.mark.parametrize("name", ["result_0.txt", "facts/rank_0000.json", "adapters_0", "rank_logs/trial_0.requests"])
def test_a_missing_file_is_reported(run: Path, name: str) -> None:
    (run / name).rename(run / "elsewhere")
    wrong_files = wrong(verify(run))
    assert [text for what, (_, text) in wrong_files.items() if what.startswith(name)][0].startswith("missing")


@pytest.mark.long
def test_adapters_and_checkpoints_are_verified_by_content(run: Path) -> None:
    """A checkpoint that changed before the run ended differs from the manifest that was written with it."""
    for name in (ADAPTERS, CHECKPOINT):
        (run / name).write_bytes(bytes([(run / name).read_bytes()[0] ^ 1]) + (run / name).read_bytes()[1:])
    (run / "adapters_0/added.safetensors").touch()
    assert wrong(verify(run)).keys() == {ADAPTERS, CHECKPOINT, "adapters_0/added.safetensors"}
    manifest.write(run)
    assert wrong(verify(run)).keys() == {CHECKPOINT}


@pytest.mark.long
def test_a_manifest_of_an_earlier_version_has_no_checksums_of_weights(run: Path) -> None:
    known = json.loads((run / "manifest.json").read_text())
    del known["sha256"]
    known["folders"] = ["adapters_0", "checkpoints/trial_0"]
    known["files"] = {name: x for name, x in known["files"].items() if not name.startswith(tuple(known["folders"]))}
    atomic_files.write(run / "manifest.json", manifest._sealed(known))
    verified = verify(run)
    assert verified.passed
    unknown = [each.what for each in verified.compared if each.actual == "no checksums: an earlier version wrote none"]
    assert unknown == ["adapters_0/, its files", "checkpoints/trial_0/, its files"]


@pytest.mark.long
def test_an_added_log_and_a_link_are_reported(run: Path) -> None:
    shutil.copy(run / "result_0.txt", run / "result_2.txt")
    (run / "health.json").rename(run / "elsewhere")
    (run / "health.json").symlink_to("elsewhere")
    wrong_files = wrong(verify(run))
    assert (
        wrong_files.keys() == {"result_2.txt", "health.json"}
        and wrong_files["health.json"][1] == "missing, or a symbolic link"
    )


@pytest.mark.long
@pytest.mark.parametrize(("has_status", "why"), [(True, "was killed before it could"), (False, "has not ended")])
def test_a_run_without_a_manifest_is_not_verified(run: Path, has_status: bool, why: str) -> None:
    (run / "manifest.json").unlink()
    if not has_status:
        (run / "status.json").unlink()
    wrong_files = wrong(verify(run))
    assert [*wrong_files] == ["manifest.json"] and why in wrong_files["manifest.json"][1]


@pytest.mark.long
def test_resuming_a_run_moves_its_manifest_away(run: Path) -> None:
    ledger.reopen(run)
    assert {path.name for path in (run / "attempts/run.1").iterdir()} == {"status.json", "manifest.json"}
    with pytest.raises(ZeroDivisionError), ledger.reopened(run):
        assert [*run.glob("attempts/run.2")] == [], "there is nothing to move"
        raise ZeroDivisionError
    for path in (run / "attempts/run.1").iterdir():
        path.rename(run / path.name)
    with pytest.raises(ZeroDivisionError), ledger.reopened(run):
        raise ZeroDivisionError
    assert verify(run).passed


# With a new manifest, changes are detected by comparing the files with each other.


def swapped(run: Path) -> None:
    (run / "result_0.txt").rename(run / "away")
    (run / "result_1.txt").rename(run / "result_0.txt")
    (run / "away").rename(run / "result_1.txt")
    kept = json.loads((run / "ledger.json").read_text())
    for name in ("log_sha256", "log_bytes", "minutes"):
        kept[0][name], kept[1][name] = kept[1][name], kept[0][name]
    atomic_files.write(run / "ledger.json", kept)


def edited(run: Path) -> None:
    log = run / "result_0.txt"
    log.write_bytes(log.read_bytes().replace(b'"lora_alpha", "value": 32', b'"lora_alpha", "value": 64'))
    kept = json.loads((run / "ledger.json").read_text())
    kept[0] |= trials.content(log)
    atomic_files.write(run / "ledger.json", kept)


def in_ledger(run: Path) -> None:
    kept = json.loads((run / "ledger.json").read_text())
    kept[1]["minutes"] = 0.001
    atomic_files.write(run / "ledger.json", kept)


def in_plan(run: Path) -> None:
    (run / "plan.json").write_text((run / "plan.json").read_text().replace('"lr": 0.0004', '"lr": 0.0003'))


def in_config(run: Path) -> None:
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("lr: 0.0004", "lr: 0.0003"))


def in_attached(run: Path) -> None:
    (run / "rank_logs/trial_0.requests").write_text("0.2\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swapped, {"result_0.txt, attempt": "LOG-17", "result_1.txt, attempt": "LOG-17"}),
        (edited, {"result_0.txt, its own checksums": "LOG-18"}),
        (in_attached, {"result_0.txt, its own checksums": "LOG-18"}),
        (in_ledger, {"result_1.txt, minutes in the ledger": None}),
        (in_plan, {"plan.json, ledger": "CFG-12", "job.sbatch, its plan": None, "config.yaml, in the plan": None}),
        (in_config, {"config.yaml, in the plan": None}),
    ],
)
def test_contradicting_files_are_reported_despite_a_new_manifest(
    run: Path, change: Callable[[Path], None], expected: dict[str, str | None]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    change(run)
    assert before != {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    manifest.write(run)
    assert {what: rule for what, (rule, _) in wrong(verify(run)).items()} == expected


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this folder is not a run folder"):
        verify(tmp_path)
