"""What this machine alone shows of a run's folders and files, and of secrets in what is sent with it."""

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
from helpers import text_data
from helpers.serving import planned as to_serve

TOKEN = "hf_" + "aB3" * 11
GIB = 2**30


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=local", *overrides])


def of(plan: Plan) -> Subject:
    return Subject(plan, "")


def told(found: Iterable[Finding | str]) -> list[tuple[str, str, str] | str]:
    """Return rule, text and place of each finding, and what was seen."""
    return [one if isinstance(one, str) else (one.rule, one.what, one.where) for one in found]


def test_results_need_a_folder_that_can_be_written_and_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"free": 200 * 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**free))
    assert told(host.outputs(of(planned()))) == [f"200 MiB free in {tmp_path}"], "LOGDIR is still to be made"
    free["free"] -= 1
    (small,) = host.outputs(of(planned()))
    assert small == broken(
        *("CFG-08", "199 MiB free, and a run needs 200", str(tmp_path)),
        fix="make room, set LOGDIR to a larger disk",
    )
    folder = tmp_path / "mine"
    folder.mkdir()
    own = planned(f"launch.folder={folder}", "trials=2")
    (folder / own.trials[1].log).touch()
    (found,) = host.outputs(of(own))
    what = f"{own.trials[1].log} exists, and a second start never adds to it"
    fix = "leave launch.folder out for a new folder, or name another one"
    assert found == broken("CFG-05", what, str(folder / own.trials[1].log), fix=fix)
    asked = list[tuple[Path, int]]()
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    assert told(host.outputs(of(planned()))) == [("CFG-08", "results cannot be written", str(tmp_path))]
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    (tmp_path / "LOGDIR").touch()
    assert told(host.outputs(of(planned())))[0][2] == str(tmp_path / "LOGDIR"), "a file is no folder"
    monkeypatch.delenv("LOGDIR")
    with pytest.raises(CannotTellError, match="LOGDIR is not set"):
        list(host.outputs(of(planned("cluster.paths.logs=$LOGDIR"))))


def test_a_path_with_a_character_that_the_job_refuses_is_named(tmp_path: Path) -> None:
    (found,) = host.paths(of(planned("cluster.paths.logs='/a`b'")))
    assert found.rule == "CFG-06" and found.what == "LOGDIR holds '`'"
    assert found.fix == "move or link it to a path without"


def test_rows_and_a_checkpoint_are_looked_for_where_the_site_has_them(tmp_path: Path) -> None:
    plan = planned()
    plan.config.data.source = DataSource.prepared
    assert host.takes_prepared_rows(plan) and not host.takes_prepared_rows(planned())
    *missing, seen = host.rows(of(plan))
    assert seen == plan.data_dir and isinstance(missing[0], Finding) and missing[0].rule == "CFG-06"
    (tmp_path / "metadata.json").write_text("{")
    (damaged,) = data.checkpoint(tmp_path, plan.config)
    assert damaged.what.startswith("metadata.json cannot be read: ") and damaged.where == f"{tmp_path}/metadata.json"
    (tmp_path / "metadata.json").write_text("[]")
    assert next(iter(data.checkpoint(tmp_path, plan.config))).what == (
        "metadata.json is not that of a megatron-core checkpoint"
    )


def generating(tmp_path: Path, *overrides: str) -> GenerationPlan:
    made = compose.compose(["task=generate_tiny", "model.weights=checkpoint", "cluster=local", *overrides])
    assert isinstance(made, GenerationPlan)
    return made


def test_a_generator_takes_hugging_face_weights_and_their_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "MODEL"
    plan = generating(tmp_path, "engine=huggingface")
    assert host.takes_checkpoint(plan) and data.takes_prompts(plan)
    assert told(host.checkpoint(of(plan)))[-1] == str(model) != told(host.checkpoint(of(plan)))[0]
    (none,) = data.prompts(of(plan))
    assert isinstance(none, Finding) and none.rule == "CFG-06" and "tokenizer.json" in none.what
    text_data.write_tokenizer(model)
    (model / "config.json").write_text("{}")
    assert told(host.checkpoint(of(plan))) == [str(model)]
    assert told(data.prompts(of(plan))) == [str(model / "tokenizer.json")]
    (model / "tokenizer_config.json").write_text("{}")
    (unnamed,) = data.prompts(of(plan))
    assert isinstance(unnamed, Finding) and "eos_token" in unnamed.what


def test_without_the_paths_that_name_them_nothing_is_said_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = generating(tmp_path, "engine=huggingface", "cluster.paths.model=$NOWHERE")
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(CannotTellError, match="MODEL is not set"):
        list(data.prompts(of(plan)))
    with pytest.raises(CannotTellError, match="MODEL is not set"):
        list(host.checkpoint(of(plan)))
    assert [*data._other_tokenizer(tmp_path, None)] == []


def test_files_of_text_that_cannot_be_read_or_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    sizes = ("data.train_rows=3", "data.eval_rows=1", "data.seq_length=4", "data.test_split=null")
    recipe = ("recipe.eval_every_samples=1", "recipe.global_batch_size=1", "recipe.lr_warmup_steps=0")
    made = text_data.plan(tmp_path, "data=c4", "data.files=c4.json.gz", *sizes, *recipe)

    def found() -> list[Any]:
        return told(data.found(made, root=cache, rows=tmp_path / "none"))

    path = cache / "c4.json.gz"
    path.write_bytes(gzip.compress(b'{"text": "oak"}\n')[:-9])
    assert found() == [
        ("CFG-06", "the gzip is damaged: Compressed file ended before the end-of-stream marker was reached", str(path))
    ]
    opened = gzip.open

    def refused(name: Any, mode: str) -> Any:
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr(gzip, "open", refused)
    assert found() == [("CFG-06", "cannot be read: Permission denied", str(path))]
    monkeypatch.setattr(gzip, "open", opened)
    path.write_bytes(gzip.compress(b'{"text": "oak"}\n'))
    assert found() == ["1 files, 0.00 GB"]
    monkeypatch.setattr(os, "access", lambda place, mode: (place, mode) != (cache, os.W_OK | os.X_OK))
    assert found() == ["1 files, 0.00 GB", ("CFG-08", "rows cannot be written", str(cache))]


def test_without_pyarrow_a_parquet_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"none")
    with pytest.raises(ConfigError, match="the parquet is cut short or damaged"):
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
    missing = [("CFG-06", f"there is no {name}", str(model)) for name in ("config.json", "tokenizer.json")]
    assert preflight.reads_model(plan) and told(preflight.model(of(plan))) == [*missing, str(model)]
    fix = "name a folder of Hugging Face's format by MODEL or task.serving.server.model, or set model.weights=random"
    assert [one.fix for one in preflight.model(of(plan)) if isinstance(one, Finding)] == [fix] * 2
    text_data.write_tokenizer(model)
    (model / "config.json").touch()
    assert told(preflight.model(of(plan))) == [str(model)]
    assert preflight.is_started_here(plan)
    places = {"serve": "/bin/serve"}
    monkeypatch.setattr(shutil, "which", places.get)
    assert told(preflight.program(of(plan))) == ["/bin/serve"]
    places.clear()
    (found,) = preflight.program(of(plan))
    assert isinstance(found, Finding)
    assert (found.rule, found.what, found.where) == ("SRV-01", "serve is not on PATH", "task.serving.server.argv")
    assert "name the path of serve, or choose another server=" in found.fix
    nowhere = to_serve("model.weights=checkpoint", "cluster.paths.model=$NOWHERE")
    with pytest.raises(CannotTellError, match="MODEL is not set"):
        list(preflight.model(of(nowhere)))


def test_secrets_of_a_script_and_of_a_command_line_are_named_by_line_and_option() -> None:
    script = f"#!/bin/sh\nexport HF_TOKEN=$HF_TOKEN\nAPI_KEY=abc\n\ncurl {TOKEN}\nexport PASSWORD=\n"
    words = ("--export=A_TOKEN=b", f"--comment={TOKEN}", TOKEN, "--qos=gold")
    found = [*secrets.secrets(Subject(planned(), script, words))]
    assert [(one.rule, one.what, one.where) for one in found] == [
        ("CFG-07", "a value of API_KEY stands in the job script", "line 3"),
        ("CFG-07", found[1].what, "line 5"),
        ("CFG-07", "a value of A_TOKEN stands on sbatch's command line", "--export"),
        ("CFG-07", found[3].what, "--comment"),
        ("CFG-07", found[4].what, "an argument"),
    ]
    assert found[1].what.startswith("a Hugging Face token") and found[1].what.endswith("stands in the job script")
    assert found[3].what.endswith("stands on sbatch's command line") and TOKEN not in str(found)
