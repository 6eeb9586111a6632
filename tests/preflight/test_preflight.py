"""What a laptop can tell of a run before anything starts: each rule broken on purpose, and the shipped runs clean."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy_format

from bench import preflight
from bench.contract import checkpoint
from bench.contract.schema import Data, DataSource
from bench.errors import ConfigError
from bench.planning import compose, npy_header
from bench.preflight import data, host
from bench.rules.check import Subject
from helpers import model_folders

ON_SLURM = ("task=lora70b", "cluster=dgx2", "container=pyxis")
PATHS = {"DATADIR": "/lustre/data", "MODEL": "/lustre/model", "LOGDIR": "/lustre/logs", "CONT": "/lustre/a.sqsh"}


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATHS.items():
        monkeypatch.setenv(name, value)


def test_checkpoints_need_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """525,440 weights of 12 bytes, in two checkpoints per trial of five trials, and one being written: 66 MiB."""
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=250 * 2**20))
    plain = ("task=pretrain_tiny", "cluster=local", "trials=5")
    for saving, severities in (((), []), (("task.training.checkpoint_every_steps=9",), ["error"])):
        plan = compose.compose([*plain, *saving])
        problem = [one for one in host.outputs(Subject(plan, "")) if not isinstance(one, str)]
        assert [one.severity for one in problem] == severities
    assert "only 250 MiB of disk space are free, but the run needs 266 MiB" in problem[
        0
    ].what and "checkpoint_every_steps=null" in str(problem[0])


def arguments(*words: str) -> str:
    return f"cluster.slurm.arguments={json.dumps(words)}"


BROKEN = {
    "time above the cluster's": (
        (arguments("--time=3:00:00"), "cluster.slurm.max_walltime_min=120"),
        "SLU-02",
        "180 min",
    ),
    "time in two words": ((arguments("-t", "2-0"), "cluster.slurm.max_walltime_min=120"), "SLU-02", "2880 min"),
    "no GPU type": (
        ("cluster.slurm.gpu_request=gres_typed",),
        "SLU-01",
        "gpu_request=gres_typed needs a GPU type, but gpu_type is not set",
    ),
    "--nodes": ((arguments("--nodes=1"),), "CFG-09", "--nodes conflicts with an option that the script sets"),
    "-N": ((arguments("-N", "1"),), "CFG-09", "--nodes conflicts with an option that the script sets"),
    "--out": ((arguments("--out=/tmp/x"),), "CFG-09", "--output conflicts with an option that the script sets"),
    "--wra": ((arguments("--wra=true"),), "CFG-09", "--wrap conflicts with an option that the script sets"),
    "a quote in the run folder's name": (("launch.folder='/a\"b'",), "CFG-06", "the path of the run folder contains"),
    "--gres": ((arguments("--gres=gpu:8"),), "CFG-09", "cluster.slurm.gpu_request"),
    "--array": ((arguments("--array=0-9"),), "CFG-09", "launch.array=true"),
    "--wrap": ((arguments("--wrap=true"),), "CFG-09", "sbatch does not submit the job"),
    "--export": ((arguments("--export=NONE"),), "CFG-09", "(PATH, DATADIR, LOGDIR, …)"),
    "two words in one": ((arguments("--exclude dgx-1"),), "CFG-09", "write --exclude=dgx-1"),
    "a word alone": (
        (arguments("--exclusive", "dgx-1"),),
        "CFG-09",
        "sbatch would read this text as the file name of the script",
    ),
    "a container flag": (
        (arguments("--container-image=a"),),
        "PYX-10",
        "batch script itself would run in the container",
    ),
    "a value too many": (
        (arguments("--container-writable=true"),),
        "PYX-05",
        "has a value, but this option takes no value",
    ),
    "a flag as mount": (("container.mounts=['--container-writable']",), "PYX-05", "is an option and not a mount"),
    "a mount's comma": (("container.mounts=['/a:/b:ro,nosuid']",), "PYX-12", "join flags with +"),
    "a mount without target": (("container.mounts=['/a:']",), "PYX-12", "an empty part"),
    "a relative mount": (("container.mounts=['a:/b']",), "PYX-12", "does not begin with / or ./"),
    "a mount's variable": (
        ("container.mounts=['$NOBODY_SET_THIS:/b']",),
        "CFG-06",
        "contains an environment variable that is not set",
    ),
    "a mount without container": (
        ("container=none", "container.mounts=['/a:/b']"),
        "PYX-04",
        "container.mounts is set, but has no effect",
    ),
    "two commands to drop caches": (
        ("cluster.drop_caches='sync; drop'",),
        "CFG-09",
        "must be one program with arguments",
    ),
    "half a quotation": (("cluster.drop_caches='sudo \\'drop'",), "CFG-09", "must be one program with arguments"),
    "no image": (("container.image=null",), "PYX-04", "the container image is not set"),
    "a registry's slash": (("container.image=nvcr.io/nvidia/pytorch:25.01-py3",), "PYX-06", "nvcr.io#nvidia/pytorch"),
    "another schedule": (
        ("recipe.eval_every_samples=192",),
        "CFG-03",
        "but the rules require 1,536 samples and an interval of 384 samples",
    ),
    "no reference": (("recipe.global_batch_size=4",), "CFG-04", "for a global batch size of 4"),
    "a secret by name": (("+cluster.environment.WANDB_API_KEY=abc",), "CFG-07", "a value of WANDB_API_KEY"),
    "a proxy's password": (
        ("+cluster.environment.http_proxy='http://me:pw@proxy:3128'",),
        "CFG-07",
        "a password in an address",
    ),
}
WARNINGS = ("CFG-03", "CFG-04")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_finding(case: str) -> None:
    overrides, rule, text = BROKEN[case]
    (problem,) = [f for f in inspect(*overrides) if (f.rule, rule) != ("PYX-10", "PYX-05")]
    assert problem.rule == rule and text in " ".join((problem.what, problem.where, problem.fix)), problem
    assert problem.severity == ("warning" if rule in WARNINGS or "is set, but has no effect" in text else "error")


def inspect(*overrides: str) -> list[preflight.Finding]:
    return preflight.inspect(compose.compose([*ON_SLURM, *overrides]))


QLORA = ("task=qlora_70b", "cluster=dgx1", "container=pyxis", "model.weights=random")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("task.training.max_steps=1000",), "set walltime=180 or more"),
        (("task.training.max_steps=1000", "cluster.slurm.max_walltime_min=180"), "this cluster allows only 180"),
        (("task.training.max_steps=1000", "walltime=180"), None),
        (("task.training.max_steps=700",), None),
        (("task.training.max_steps=1000", "gpu@cluster.gpu=a800"), None),
    ],
)
def test_a_walltime_below_the_projected_time_is_a_warning(words: tuple[str, ...], fix: str | None) -> None:
    """155.8 minutes for 1000 steps and 120 of walltime; without an estimate of the step there is no finding."""
    problems = [one for one in preflight.inspect(compose.compose([*QLORA, *words])) if one.rule == "CFG-13"]
    if fix is None:
        assert problems == []
        return
    (short,) = problems
    assert short.severity == "warning" and fix in short.fix
    assert short.what == "a trial takes an estimated 155.8 min, but walltime is 120 min"
    if fix.startswith("set walltime"):
        assert preflight.inspect(compose.compose([*QLORA, *words, "walltime=180"])) == []


FINE = {
    "excluded nodes": (
        arguments(
            "--exclude=dgx-7", "-x", "dgx-8", "-w", "dgx-9", "--comment=x", "--export=ALL,A=b", "--mem-bind=local"
        ),
    ),
    "less time": (arguments("--time=20"), "cluster.slurm.max_walltime_min=120"),
    "mounts": ("container.mounts=['/a', '/a b:/c:ro+nosuid', './d:./e', 'tmpfs:/scratch', '$DATADIR:/f']",),
    "an image in a registry": ("container.image='nvcr.io#nvidia/pytorch:25.01-py3'",),
    "a reference to a secret": (
        "+cluster.environment.HF_TOKEN_PATH=/home/me/token",
        "+cluster.environment.TOKENIZERS_PARALLELISM='0'",
    ),
    "flags by environment": ("container.flags=environment",),
}


@pytest.mark.parametrize("case", FINE)
def test_valid_settings_have_no_findings(case: str) -> None:
    assert inspect(*FINE[case]) == []


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["dgx1", "dgx2", "dgx8", "dgxh200"])
@pytest.mark.parametrize("task", ["lora70b", "lora70b_quick"])
def test_shipped_runs_are_clean(task: str, cluster: str) -> None:
    overrides = [f"task={task}", f"cluster={cluster}", "container=pyxis", "recipe.global_batch_size=32"]
    assert preflight.inspect(compose.compose(overrides)) == []


@pytest.mark.parametrize("name", [*PATHS])
def test_a_path_that_is_not_set_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    (problem,) = inspect()
    assert (problem.rule, problem.what) == ("CFG-06", f"{name} is not set")
    assert problem.fix.startswith(f"export {name}={'IMAGE' if name == 'CONT' else 'FOLDER'}, ")
    with pytest.raises(ConfigError, match=f"CFG-06: {name} is not set"):
        preflight.require([problem])


@pytest.mark.parametrize(
    ("value", "rule", "text"),
    [
        ("data", "CFG-06", "must be an absolute path"),
        ('/a"b', "CFG-06", "contains the character '\"'"),
        ("/a,b", "PYX-12", "','"),
        ("/a b", "PYX-12", "0.24"),
    ],
)
def test_a_path_that_the_job_would_misread_is_reported(
    value: str, rule: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATADIR", value)
    (problem,) = inspect()
    assert problem.rule == rule and text in problem.what


TOKENS = {
    "hf": "hf_" + "aB3" * 11,
    "nvapi": "nvapi-" + "x1-Y" * 15,
    "aws": "AKIA" + "ABCD1234EFGH5678",
    "github": "ghp_" + "a1B2" * 9,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
}


@pytest.mark.parametrize("place", ["cluster.environment.SOMETHING", "cluster.platform", "argument"])
@pytest.mark.parametrize("kind", TOKENS)
def test_a_secret_is_found_everywhere_and_never_shown(kind: str, place: str) -> None:
    token = TOKENS[kind]
    override = arguments(f"--comment={token}") if place == "argument" else f"+{place}={token}"
    problem = inspect(override if place != "cluster.platform" else override.lstrip("+"))
    assert [f.rule for f in problem] == ["CFG-07"], "each secret is reported once"
    assert token not in str(problem) and (place == "argument" or problem[0].where == place)


def test_a_secret_of_this_environment_is_found_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse battery")
    (problem,) = inspect("cluster.platform='box correct horse battery box'")
    assert "the value of MY_SERVICE_PASSWORD" in problem.what and "horse" not in str(problem)


def test_warnings_do_not_stop_a_run() -> None:
    problem = inspect("recipe.eval_every_samples=192")
    assert [f.severity for f in problem] == ["warning"]
    preflight.require(problem)


ROWS = Data(
    name="rows",
    summary="",
    source=DataSource.prepared,
    seq_length=4,
    train_rows=3,
    eval_rows=2,
    answer_only=True,
)


def prepared(folder: Path) -> Path:
    for name, count in (("train", 3), ("eval", 2)):
        np.save(folder / f"{name}_tokens.npy", np.zeros((count, 4), np.int32))
        np.save(folder / f"{name}_counts.npy", np.zeros((count, 4), bool))
    return folder


def test_rows_as_planned_are_fine(tmp_path: Path) -> None:
    assert list(data.prepared_rows(prepared(tmp_path), ROWS)) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "none": (lambda p: [file.unlink() for file in p.glob("*.npy")], "no prepared rows of rows"),
    "one is missing": (lambda p: (p / "eval_tokens.npy").unlink(), "eval_tokens.npy cannot be read: No such file"),
    "other rows": (
        lambda p: np.save(p / "train_tokens.npy", np.zeros((2, 4), np.int32)),
        r"\(2, 4\), but the plan needs \(3, 4\)",
    ),
    "floats": (
        lambda p: np.save(p / "train_tokens.npy", np.zeros((3, 4), np.float32)),
        "has dtype <f4, but tokens must be whole",
    ),
    "swapped": (
        lambda p: np.save(p / "eval_counts.npy", np.zeros((2, 4), np.int32)),
        "has dtype <i4, but counts must be bool",
    ),
    "cut": (lambda p: cut(p / "train_tokens.npy"), "has 175 bytes, but its header requires 176 bytes"),
    "not npy": (lambda p: (p / "train_counts.npy").write_bytes(b"PK\3\4"), "not an .npy file"),
    "half a header": (
        lambda p: (p / "train_counts.npy").write_bytes(b"\x93NUMPY\x01\x00\x76"),
        "header of the .npy file is damaged",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_rows_that_differ_from_the_plan_are_reported(case: str, tmp_path: Path) -> None:
    damage, text = DAMAGE[case]
    damage(prepared(tmp_path))
    (problem,) = data.prepared_rows(tmp_path, ROWS)
    assert problem.rule == "CFG-06" and re.search(text, problem.what), problem


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(("<i4", ">i8", "|b1", "<f4", "|u1")),
    version=st.sampled_from(((1, 0), (2, 0), (3, 0))),
)
def test_headers_are_read_as_numpy_writes_them(
    shape: tuple[int, ...], dtype: str, version: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = io.BytesIO()
    npy_format.write_array(file, np.zeros(shape, dtype), version=version)
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    path.write_bytes(file.getvalue())
    assert npy_header.read(path) == npy_header.Npy(shape, dtype, path.stat().st_size)


def test_a_manifest_shows_missing_truncated_and_changed_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text("12345")
    digest = "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5"
    entries = [{"path": name, "bytes": 5, "sha256": digest} for name in ("a", "b", "c", "d")]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    assert list(data.manifest(tmp_path)) == []
    (tmp_path / "b").unlink()
    (tmp_path / "c").write_text("1234")
    (tmp_path / "d").write_text("54321")
    (problem,) = data.manifest(tmp_path)
    assert "3 of 4 files" in problem.what and "b is missing, and 2 more" in problem.what
    (tmp_path / "manifest.json").write_text('{"files": 3}')
    (problem,) = data.manifest(tmp_path)
    assert "manifest.json cannot be read" in problem.what


def test_only_folders_that_a_run_prepares_may_be_deleted(tmp_path: Path) -> None:
    """The base of this task is trained by the run, but its own rows are the user's: they are in DATADIR itself."""
    (tmp_path / "manifest.json").write_text('[{"path": "rows.npy", "bytes": 3}]')
    words = ["task=lora_tiny", "cluster=local", f"cluster.paths.data={tmp_path}"]
    fixes = [one.fix for one in preflight.inspect(compose.compose([*words, "data.source=prepared"]))]
    assert "copy these files again from their source" in fixes and not [fix for fix in fixes if "rm -r" in fix]
    rows = Path(compose.compose(words).data_dir or "")  # type: ignore[attr-defined]
    rows.mkdir()
    (tmp_path / "manifest.json").rename(rows / "manifest.json")
    fixes = [one.fix for one in preflight.inspect(compose.compose(words))]
    assert [fix for fix in fixes if fix.endswith(f"rm -r {rows}")]


@pytest.mark.long
def test_a_checkpoint_is_known_by_its_metadata(tmp_path: Path) -> None:
    config = compose.compose([]).config
    manifest = {"model": checkpoint.model_of(config.model)}
    (missing,) = data.checkpoint(tmp_path, config)
    assert "no megatron-core checkpoint of tiny" in missing.what
    (tmp_path / "metadata.json").write_text("{}")
    (other,) = data.checkpoint(tmp_path, config)
    assert "does not describe a megatron-core checkpoint" in other.what
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert list(data.checkpoint(tmp_path, config)) == []
    (tmp_path / "manifest.json").write_text(json.dumps({"model": manifest["model"] | {"rope_base": 7}}))
    (elsewhere,) = data.checkpoint(tmp_path, config)
    assert "the weights do not match the model tiny: rope_base is 7 instead of 10000" in elsewhere.what
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"precision": "fp8"}))
    (quantised,) = data.checkpoint(tmp_path, config)
    assert (
        "the weights are stored in FP8, but precision=fp32 cannot use FP8 weights" in quantised.what
        and "precision=fp8" in quantised.fix
    )
    assert list(data.checkpoint(tmp_path, compose.compose(["precision=fp8"]).config)) == []
    whole = compose.compose(["precision=fp8", "task.training.trains=all", "task.training.lora=null"]).config
    (trained,) = data.checkpoint(tmp_path, whole)
    assert (
        "the weights are stored in FP8, but task.training.trains=all" in trained.what and "without --fp8" in trained.fix
    )
    four_bits = compose.compose(["precision=bf16", "task.training.trains=qlora"]).config
    (not_in_four,) = data.checkpoint(tmp_path, four_bits)
    assert "the weights are stored in FP8" in not_in_four.what and "without --fp8" in not_in_four.fix
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"precision": "nf4"}))
    assert list(data.checkpoint(tmp_path, four_bits)) == []
    (in_four,) = data.checkpoint(tmp_path, config)
    assert (
        "the weights are stored in NF4, but task.training.trains=lora" in in_four.what and "trains=qlora" in in_four.fix
    )


def test_hugging_face_weights_are_distinguished_from_converted_ones(tmp_path: Path) -> None:
    config = compose.compose([]).config
    (tmp_path / "config.json").write_text("{}")
    (unknown,) = data.checkpoint(tmp_path, config)
    assert "model_type in config.json is None" in unknown.what
    model_folders.write(tmp_path, config.model)
    (source,) = data.checkpoint(tmp_path, config)
    assert "not converted" in source.what and "runstop prepare" in source.fix


def test_the_huggingface_engine_reads_hugging_face_weights_directly(tmp_path: Path) -> None:
    config = compose.compose(["engine=huggingface"]).config
    (tmp_path / "config.json").write_text("{")
    (damaged,) = data.checkpoint(tmp_path, config)
    assert "config.json cannot be read" in damaged.what
    for wrong, what in (
        ({"model_type": "mistral"}, "model_type is mistral, but tiny is a llama"),
        ({"vocab_size": 7}, "vocab_size is 7"),
    ):
        model_folders.write(tmp_path, config.model, **wrong)
        (other,) = data.checkpoint(tmp_path, config)
        assert what in other.what and other.where.endswith("config.json")
    model_folders.write(tmp_path, config.model)
    assert list(data.checkpoint(tmp_path, config)) == []
    (tmp_path / "model.safetensors").unlink()
    (pickled,) = data.checkpoint(tmp_path, config)
    assert "the folder contains no *.safetensors" in pickled.what
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1", "b": "2"}}')
    (tmp_path / "1").touch()
    (partial,) = data.checkpoint(tmp_path, config)
    assert "1 of 2 files of the model are missing, for example 2" in partial.what


@pytest.mark.parametrize("path", ["/", "/proc/self", "/dev/shm", "/sys/kernel", str(Path(__file__).parent)])
def test_the_file_system_of_a_path_is_that_of_findmnt(path: str) -> None:
    done = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", "-T", path], capture_output=True, text=True, check=True)
    assert host.file_system(path, Path("/proc/self/mountinfo").read_text()) == done.stdout.split()[0]


VERB = {
    "fine": ((), 0, "checks, all passed\npaths are set: passed  (CFG-06)\n"),
    "an error": (("parallel={tp: 1, cp: 1, sp: false}", "task=lora70b"), 1, "no prepared rows of gov_report"),
    "no Slurm": (("--tier", "login"), 2, "--tier login needs a cluster with a queue, but cluster=local has no queue"),
    "no such key": (("recipe.lrr=1",), 2, "did you mean recipe.lr=1?"),
}


@pytest.mark.starts
@pytest.mark.parametrize("case", VERB)
def test_exit_code_and_output_of_the_doctor(case: str, tmp_path: Path) -> None:
    words, exit_code, text = VERB[case]
    here_only = {name: str(tmp_path) for name in ("DATADIR", "MODEL", "LOGDIR")}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "doctor", *words], env=os.environ | here_only, capture_output=True, text=True
    )
    assert done.returncode == exit_code and text in done.stdout + done.stderr, done
    assert list(tmp_path.iterdir()) == []
