"""What a trial reads is compared with its checksums; the log names them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.contract import checksums, mllog, plan_kinds
from bench.contract.mllog import Binding
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from helpers import ranks
from jobs.data import rows as rows_of
from jobs.data.micro_batches import targets
from jobs.ranks import process_group, program
from jobs.ranks.identity import Rank
from jobs.tasks import inputs
from jobs.tasks.prepare import prepare_rows_of

ALL = np.arange(8)


@pytest.fixture
def no_log() -> Iterator[mllog.Writer]:
    with mllog.Writer(None) as log:
        yield log


@pytest.fixture
def plan(tmp_path: Path) -> TrainingPlan:
    """A plan of one rank whose rows are prepared, and whose base is a folder of two files."""
    composed = plan_kinds.required(ranks.compose(tmp_path, "cluster.ranks_per_node=1"), TrainingPlan)
    composed.config.training_data.train_rows, composed.config.training_data.eval_rows = 20, 8
    prepare_rows_of(composed)
    base = Path(str(composed.base_dir))
    base.mkdir(parents=True)
    for name in ("metadata.json", "__0_0.distcp", "README.md"):
        (base / name).write_text(f"{name} and more")
    checksums.write(base, checksums.weight_files(base))
    return composed


def rewritten(folder: Path) -> None:
    """Let every evaluation row count its last token only, as H1 did: the files keep their form and size."""
    counts = np.load(folder / "eval_counts.npy")
    new = np.zeros_like(counts)
    for row, old in zip(new, counts, strict=True):
        row[np.flatnonzero(old)[-1]] = True
    np.save(folder / "eval_counts.npy", new)


def sealed_again(folder: Path) -> None:
    rewritten(folder)
    tokens, counts = (np.load(folder / f"eval_{part}.npy") for part in ("tokens", "counts"))
    np.save(folder / "eval_sha256.npy", rows_of.sha256_rows(tokens, counts))


def of_an_earlier_version(folder: Path) -> None:
    """Leave the folder as earlier versions wrote it, with the checksums of whole files only; then change a row."""
    names = [path.name for path in folder.glob("*.npy") if "sha256" not in path.name]
    for path in folder.glob("*sha256.npy"):
        path.unlink()
    checksums.write(folder, names)
    rewritten(folder)


def longer(folder: Path) -> None:
    np.save(folder / "eval_lengths.npy", np.load(folder / "eval_lengths.npy") + 1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (sealed_again, "eval_sha256.npy was changed: its SHA-256 differs from the recorded SHA-256"),
        (lambda folder: (folder / "eval_sha256.npy").unlink(), "eval_sha256.npy is missing"),
        (of_an_earlier_version, "eval_counts.npy was changed: its SHA-256 differs from the recorded SHA-256"),
        (longer, "eval_lengths.npy was changed"),
    ],
)
def test_changed_rows_are_refused_when_they_are_opened(
    plan: TrainingPlan, change: Callable[[Path], None], what: str
) -> None:
    change(Path(str(plan.data_dir)))
    with pytest.raises(ConfigError, match=what) as refused:
        rows_of.load(plan, "eval")
    assert refused.value.rule == "CFG-12"
    rows_of.load(plan, "train")


def test_a_changed_row_is_refused_when_it_is_read(plan: TrainingPlan) -> None:
    """Also one that changes after the rows were opened: they are memory-mapped."""
    folder = Path(str(plan.data_dir))
    train, rows = rows_of.load(plan, "train"), rows_of.load(plan, "eval")
    targets(rows, ALL)
    with (folder / "eval_tokens.npy").open("r+b") as file:
        file.seek(-1, 2)  # in the last row
        file.write(b"\1")
    targets(rows, ALL[:-1])
    targets(rows, np.array([0, -1]))  # -1 is an empty row, and reads no row
    with pytest.raises(ConfigError, match="the tokens or counts of row 7 were changed") as refused:
        targets(rows, ALL)
    assert refused.value.rule == "CFG-12" and str(folder) in refused.value.where
    rewritten(folder)
    with pytest.raises(ConfigError, match="the tokens or counts of row 0 were changed"):
        targets(rows_of.load(plan, "eval"), ALL)
    targets(train, ALL)


def test_rows_without_checksums_have_the_same_one_and_are_bound_when_they_are_opened(plan: TrainingPlan) -> None:
    folder, sealed = Path(str(plan.data_dir)), rows_of.load(plan, "eval")
    for path in (*folder.glob("*sha256.npy"), folder / "manifest.json"):
        path.unlink()
    rows = rows_of.load(plan, "eval")
    assert rows.sha256 == sealed.sha256 is not None
    with (folder / "eval_tokens.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(ConfigError, match="row 7"):
        targets(rows, ALL)
    assert rows_of.load(plan, "eval").sha256 != sealed.sha256


def logged(path: Path) -> dict[str, str]:
    lines = (json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines())
    return {line["metadata"]["input"]: line["value"] for line in lines if line["key"] == "input_sha256"}


def test_the_log_names_rows_and_weights(plan: TrainingPlan, tmp_path: Path) -> None:
    with mllog.Writer(tmp_path / "first") as log:
        inputs.check_weights(plan, log, Rank(0, 0, 1, "", 0))
        train, evaluation = inputs.open_rows(plan, log)
    base = Path(str(plan.base_dir))
    first = logged(tmp_path / "first")
    assert {name: first[name] for name in ("train rows", "eval rows")} == {
        "train rows": train.sha256,
        "eval rows": evaluation.sha256,
    }
    (base / "README.md").write_text("not read")
    (base / "manifest.json").unlink()  # as in a folder that a site provides
    for changed in (False, True):
        if changed:
            (base / "metadata.json").write_text("other")
        with mllog.Writer(tmp_path / f"second {changed}") as log:
            inputs.check_weights(plan, log, None)
        assert (logged(tmp_path / f"second {changed}") != {"checkpoint": first["checkpoint"]}) is changed


def test_changed_weights_are_refused(plan: TrainingPlan, no_log: mllog.Writer) -> None:
    base = Path(str(plan.base_dir))
    weights = inputs.check_weights(plan, no_log, None)
    assert weights is not None
    weights.require_unchanged()
    data = (base / "__0_0.distcp").read_bytes()
    (base / "__0_0.distcp").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ConfigError, match=r"__0_0.distcp was changed while runstop loaded this file"):
        weights.require_unchanged()
    with pytest.raises(ConfigError, match=r"weights were changed: __0_0.distcp was changed") as refused:
        inputs.check_weights(plan, no_log, None)
    assert refused.value.rule == "CFG-12"


def test_the_ranks_of_a_node_share_the_files_and_nodes_must_agree(
    plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch, no_log: mllog.Writer
) -> None:
    base, shares = Path(str(plan.base_dir)), []
    monkeypatch.setattr(inputs, "node_name", lambda: "a")
    monkeypatch.setattr(process_group, "node_names", lambda who: ["a", "a", "b"])
    for rank in (0, 1):
        monkeypatch.setattr(process_group, "gathered", lambda who, own: shares.append(own) or [own])
        inputs.check_weights(plan, no_log, Rank(rank, rank, 3, "", 0))
    assert [[*share] for _, share, _ in shares] == [["metadata.json"], ["__0_0.distcp"]]
    other = checksums.of_files(base, ["metadata.json", "README.md"])
    other = {"metadata.json": other["README.md"]}
    monkeypatch.setattr(process_group, "gathered", lambda who, own: [own, shares[1], ("b", other, "")])
    with pytest.raises(ConfigError, match=r"b and a have different weights in the file metadata.json"):
        inputs.check_weights(plan, no_log, Rank(0, 0, 3, "", 0))


@pytest.mark.long
def test_a_rank_refuses_another_plan_than_that_of_its_attempt(plan: TrainingPlan, tmp_path: Path) -> None:
    path, text = tmp_path / "plan.json", plan_kinds.dumps(plan)
    path.write_text(text)
    binding = Binding(nonce="0", trial=0, attempt=1, plan_sha256=plan_kinds.identity(text))
    assert program.loaded(path, binding) == plan
    path.write_text(text.replace(str(plan.data_dir), "/elsewhere"))  # its rows have checksums of their own
    program.loaded(path, binding)
    path.write_text(text.replace('"weight_decay": ', '"weight_decay": 1'))
    program.loaded(path, Binding(nonce="0", trial=0, attempt=1))
    with pytest.raises(ConfigError, match=r"plan.json was changed since this trial began") as refused:
        program.loaded(path, binding)
    assert refused.value.rule == "CFG-12"
