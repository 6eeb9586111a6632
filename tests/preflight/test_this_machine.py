"""Checks of a run's folders and files on this machine, and of secrets in its script and arguments."""

import builtins
import gzip
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import preflight
from bench.contract.plan import Plan
from bench.contract.plan_kinds import GenerationPlan
from bench.contract.schema import DataSource
from bench.errors import ConfigError
from bench.planning import compose
from bench.preflight import data, host, secrets
from bench.rules.check import CannotTellError, Subject
from bench.rules.finding import Finding, broken
from helpers import model_folders, text_data
from helpers.serving import planned as to_serve

TOKEN = "hf_" + "aB3" * 11
GIB = 2**30


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=local", *overrides])


def subject(plan: Plan) -> Subject:
    return Subject(plan, "")


def short(outcomes: Iterable[Finding | str]) -> list[tuple[str, str, str] | str]:
    """Return rule, message and place of each finding, and the texts about what was seen."""
    return [one if isinstance(one, str) else (one.rule, one.what, one.where) for one in outcomes]


@pytest.mark.long
def test_results_need_a_writable_folder_with_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"free": 200 * 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**free))
    assert short(host.outputs(subject(planned()))) == [f"200 MiB free in {tmp_path}"], "LOGDIR does not exist yet"
    free["free"] -= 1
    (small,) = host.outputs(subject(planned()))
    assert small == broken(
        *("CFG-08", "only 199 MiB of disk space are free, but the run needs 200 MiB", str(tmp_path)),
        fix="free disk space, or set LOGDIR to a larger disk",
    )
    folder = tmp_path / "mine"
    folder.mkdir()
    own = planned(f"launch.folder={folder}", "trials=2")
    (folder / own.trials[1].log).touch()
    (problem,) = host.outputs(subject(own))
    what = f"the log {own.trials[1].log} already exists, and runstop never changes an existing log"
    fix = "remove launch.folder to get a new folder, or set launch.folder to another folder"
    assert problem == broken("CFG-05", what, str(folder / own.trials[1].log), fix=fix)
    checked = list[tuple[Path, int]]()
    monkeypatch.setattr(os, "access", lambda path, mode: checked.append((path, mode)))
    assert short(host.outputs(subject(planned()))) == [
        ("CFG-08", "this user has no permission to write results into this folder", str(tmp_path))
    ]
    assert checked == [(tmp_path, os.W_OK | os.X_OK)]
    (tmp_path / "LOGDIR").touch()
    assert short(host.outputs(subject(planned())))[0][2] == str(tmp_path / "LOGDIR"), "a file cannot be the folder"
    monkeypatch.delenv("LOGDIR")
    with pytest.raises(CannotTellError, match="LOGDIR is not set"):
        list(host.outputs(subject(planned("cluster.paths.logs=$LOGDIR"))))


def test_a_path_with_an_invalid_character_is_reported(tmp_path: Path) -> None:
    (problem,) = host.paths(subject(planned("cluster.paths.logs='/a`b'")))
    assert problem.rule == "CFG-06" and problem.what == "LOGDIR contains the character '`', which is not allowed"
    fix = "set LOGDIR to a path without this character; this can be a symbolic link to the current path"
    assert problem.fix == fix


def test_rows_and_checkpoint_are_checked_at_the_sites_paths(tmp_path: Path) -> None:
    plan = planned()
    plan.config.data.source = DataSource.prepared
    assert host.takes_prepared_rows(plan) and not host.takes_prepared_rows(planned())
    *missing, seen = host.rows(subject(plan))
    assert seen == plan.data_dir and isinstance(missing[0], Finding) and missing[0].rule == "CFG-06"
    (tmp_path / "metadata.json").write_text("{")
    (damaged,) = data.checkpoint(tmp_path, plan.config)
    assert damaged.what.startswith("metadata.json cannot be read: ") and damaged.where == f"{tmp_path}/metadata.json"
    (tmp_path / "metadata.json").write_text("[]")
    assert next(iter(data.checkpoint(tmp_path, plan.config))).what == (
        "metadata.json does not describe a megatron-core checkpoint"
    )


def generating(tmp_path: Path, *overrides: str) -> GenerationPlan:
    plan_ = compose.compose(["task=generate_tiny", "model.weights=checkpoint", "cluster=local", *overrides])
    assert isinstance(plan_, GenerationPlan)
    return plan_


def test_a_generator_reads_hugging_face_weights_and_their_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "MODEL"
    plan = generating(tmp_path, "engine=huggingface")
    assert host.takes_checkpoint(plan) and data.takes_prompts(plan)
    assert short(host.checkpoint(subject(plan)))[-1] == str(model) != short(host.checkpoint(subject(plan)))[0]
    (none,) = data.prompts(subject(plan))
    assert isinstance(none, Finding) and none.rule == "CFG-06" and "tokenizer.json" in none.what
    text_data.write_tokenizer(model)
    model_folders.write(model, plan.config.model)
    assert short(host.checkpoint(subject(plan))) == [str(model)]
    assert short(data.prompts(subject(plan))) == [str(model / "tokenizer.json")]
    (model / "tokenizer_config.json").write_text("{}")
    (unnamed,) = data.prompts(subject(plan))
    assert isinstance(unnamed, Finding) and "eos_token" in unnamed.what


def test_files_cannot_be_checked_if_their_paths_are_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = generating(tmp_path, "engine=huggingface", "cluster.paths.model=$NOWHERE")
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(CannotTellError, match="MODEL is not set"):
        list(data.prompts(subject(plan)))
    with pytest.raises(CannotTellError, match="MODEL is not set"):
        list(host.checkpoint(subject(plan)))
    assert [*data._other_tokenizer(tmp_path, None, compose.compose([]).config.training_data)] == []


def test_text_files_that_cannot_be_read_or_written_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    sizes = ("data.train_rows=3", "data.eval_rows=1", "data.seq_length=4", "data.test_split=null")
    recipe = ("recipe.eval_every_samples=1", "recipe.global_batch_size=1", "recipe.lr_warmup_steps=0")
    plan_ = text_data.plan(tmp_path, "data=c4", "data.files=c4.json.gz", *sizes, *recipe)

    def problems() -> list[Any]:
        return short(data.text_files(plan_, root=cache, rows=tmp_path / "none"))

    path = cache / "c4.json.gz"
    path.write_bytes(gzip.compress(b'{"text": "oak"}\n')[:-9])
    assert problems() == [
        (
            "CFG-06",
            "the gzip file is damaged: Compressed file ended before the end-of-stream marker was reached",
            str(path),
        )
    ]
    opened = gzip.open

    def refused(name: Any, mode: str) -> Any:
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr(gzip, "open", refused)
    assert problems() == [("CFG-06", "this file cannot be read: Permission denied", str(path))]
    monkeypatch.setattr(gzip, "open", opened)
    path.write_bytes(gzip.compress(b'{"text": "oak"}\n'))
    assert problems() == ["1 files, 0.00 GB"]
    monkeypatch.setattr(os, "access", lambda place, mode: (place, mode) != (cache, os.W_OK | os.X_OK))
    assert problems() == [
        "1 files, 0.00 GB",
        ("CFG-08", "this user has no permission to write rows into this folder", str(cache)),
    ]


def test_without_pyarrow_a_parquet_file_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"none")
    with pytest.raises(ConfigError, match="the parquet file is truncated or damaged"):
        data._check_head(tmp_path / "a.parquet", DataSource.fineweb_edu)
    imported = builtins.__import__

    def without(name: str, *words: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(name)
        return imported(name, *words, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    data._check_head(tmp_path / "a.parquet", DataSource.fineweb_edu)


def test_a_server_needs_its_model_and_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    argv = "task.serving.server.argv=[serve,'{model}','{port}']"
    plan = to_serve("model.weights=checkpoint", f"cluster.paths.model={model}", argv)
    missing = [("CFG-06", f"the folder has no {name}", str(model)) for name in ("config.json", "tokenizer.json")]
    assert preflight.reads_model(plan) and short(preflight.model(subject(plan))) == [*missing, str(model)]
    fix = "set MODEL or task.serving.server.model to a folder in Hugging Face format, or set model.weights=random"
    assert [one.fix for one in preflight.model(subject(plan)) if isinstance(one, Finding)] == [fix] * 2
    text_data.write_tokenizer(model)
    (model / "config.json").touch()
    assert short(preflight.model(subject(plan))) == [str(model)]
    assert preflight.is_started_here(plan)
    places = {"serve": "/bin/serve"}
    monkeypatch.setattr(shutil, "which", places.get)
    assert short(preflight.program(subject(plan))) == ["/bin/serve"]
    places.clear()
    (problem,) = preflight.program(subject(plan))
    assert isinstance(problem, Finding)
    assert (problem.rule, problem.what, problem.where) == ("SRV-01", "serve is not on PATH", "task.serving.server.argv")
    assert "write the full path of serve, or set server= to another server" in problem.fix
    nowhere = to_serve("model.weights=checkpoint", "cluster.paths.model=$NOWHERE")
    with pytest.raises(CannotTellError, match="MODEL is not set"):
        list(preflight.model(subject(nowhere)))


@pytest.mark.long
def test_secrets_in_script_and_arguments_are_reported_by_line_and_option() -> None:
    script = f"#!/bin/sh\nexport HF_TOKEN=$HF_TOKEN\nAPI_KEY=abc\n\ncurl {TOKEN}\nexport PASSWORD=\n"
    words = ("--export=A_TOKEN=b", f"--comment={TOKEN}", TOKEN, "--qos=gold")
    problems = [*secrets.secrets(Subject(planned(), script, words))]
    assert [(one.rule, one.what, one.where) for one in problems] == [
        ("CFG-07", "the job script contains a value of API_KEY, which is a secret", "line 3"),
        ("CFG-07", problems[1].what, "line 5"),
        ("CFG-07", "the command line of sbatch contains a value of A_TOKEN, which is a secret", "--export"),
        ("CFG-07", problems[3].what, "--comment"),
        ("CFG-07", problems[4].what, "an argument"),
    ]
    assert problems[1].what.startswith("the job script contains a Hugging Face token")
    assert problems[3].what.startswith("the command line of sbatch contains ") and TOKEN not in str(problems)
