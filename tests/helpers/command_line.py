"""Run command lines in this process, as a user types them in a folder with right and wrong files."""

import importlib.util
import io
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np

from bench.backends import local
from bench.cli import main
from bench.contract import checksums, families, plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.launch import run_here
from bench.planning.compose import compose
from helpers import clock, model_folders, nvml, planted_runs

UNSET = (
    *("DATADIR", "MODEL", "LOGDIR", "CONT", "CUDA_VISIBLE_DEVICES", "NEMO_PYTHON", "RAY_API_SERVER_ADDRESS"),
    *("COLUMNS", "LINES", "NO_COLOR", "PYTHONIOENCODING", "RUNSTOP_SWEEP_DIR", "HYDRA_FULL_ERROR"),
)
"""Environment variables that the commands read; a row of the table sets its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    text: str
    """stdout, then stderr."""


def answer(
    command: str,
    folder: Path,
    environment: Mapping[str, str],
    *,
    encoding: str = "utf-8",
    without: Sequence[str] = (),
    gpus: Sequence[tuple[str, float, tuple[int, int]]] = (),
) -> Answer:
    """Run `runstop command` in a folder. A run that passes its checks is not started: it prints `started`.

    without: Python packages that are not installed; gpus: those of this machine, as NVML reports them.
    """
    argv = [each.replace("{here}", str(folder)) for each in shlex.split(command)]
    own = {name: text.replace("{here}", str(folder)) for name, text in environment.items()}
    find = importlib.util.find_spec
    with (
        _in(folder, own),
        mock.patch.object(run_here, "run", _started),
        mock.patch.object(sys, "argv", ["runstop"]),
        mock.patch.object(importlib.util, "find_spec", lambda name: None if name in without else find(name)),
        _modules({"pynvml": nvml.nvml(*gpus)} | dict.fromkeys(without)),
        mock.patch.object(local, "_nvidia_gpus", lambda: len(gpus)),
        _captured(encoding) as streams,
    ):
        code = _code(argv)
    return Answer(code, "".join(stream.buffer.getvalue().decode(encoding) for stream in streams))  # type: ignore[attr-defined]


def _code(argv: list[str]) -> int:
    """Return the exit code; an exception that reaches the user is printed as Python prints it."""
    try:
        main(argv)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException:  # noqa: BLE001 - a traceback, which a test reports
        traceback.print_exc()
        return 1
    return 0


def _started(plan: object, folder: Path) -> int:
    print("started")
    return 0


@contextmanager
def _in(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    home, before = str(folder / "home"), Path.cwd()
    kept = {name: text for name, text in os.environ.items() if name not in UNSET}
    own = {"HOME": home, "XDG_CONFIG_HOME": f"{home}/.config", "COLUMNS": "200"}
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, kept | own | environment, clear=True):
            yield
    finally:
        os.chdir(before)


@contextmanager
def _modules(replaced: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Replace modules. `mock.patch.dict` would also remove those that the command imports."""
    before = {name: sys.modules[name] for name in replaced if name in sys.modules}
    sys.modules.update(replaced)  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for name in replaced:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def _captured(encoding: str) -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=how) for how in ("strict", "backslashreplace"))
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err
        for stream in (out, err):
            if not stream.closed:
                stream.flush()


RUNS = ("20261101-100000-lora_tiny-local-aaaa", "20261102-100000-lora_tiny-local-bbbb")
"""Two valid runs in the folder `runs`."""


def furnish(folder: Path) -> Path:
    """Fill a folder with the files that the commands of the table name; return it."""
    for name in ("home", "empty", "no permission", "dir with spaces", "ünïcode"):
        (folder / name).mkdir(parents=True)
    texts = {"empty.txt": "", "x.json": '{"a":1}', "notes.txt": "nothing that a benchmark prints\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bin.dat").write_bytes(bytes(range(256)) * 20)
    (folder / "loss_0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20)
    now = clock.Clock()
    with mock.patch("bench.contract.mllog.clocks_ms", now.read_ms), _in(folder, {}):
        for name in RUNS:
            planned_runs = planted_runs.plant(folder / "runs" / name, now, 100.0, plan=compose(["task=lora_tiny"]))
    log = (planned_runs / "result_0.txt").read_text()
    (folder / "trunc.txt").write_text("".join(log.splitlines(keepends=True)[:6]))
    for name in ("dir with spaces", "ünïcode"):
        (folder / name / "result_0.txt").write_text(log)
    _models(folder)
    _site(folder / "site")
    for name in ("prepared", "damaged_rows", "damaged_base"):
        _prepare(folder / name)
    return folder


def _models(folder: Path) -> None:
    """Write Hugging Face folders: without weights, with other sizes, with the sizes of another file."""
    with _in(folder, {}):
        llama = compose(["task=lora_7b", "model=llama2_7b", "model.weights=random"]).config.model
        qwen = compose(["task=lora_7b", "model=qwen3_8b", "model.weights=random"]).config.model
    for name, model in (("llama", llama), ("qwen", qwen)):
        model_folders.write(folder / "hf" / name, model)
        bare = folder / "hf" / f"{name}_bare"
        bare.mkdir()
        (bare / "config.json").write_text((folder / "hf" / name / "config.json").read_text())
    shapes = families.of_model(llama).tensors(llama)
    other = model_folders.write(folder / "hf" / "other_weights", llama)
    model_folders.write_header(other / "model.safetensors", {n: (*s[:-1], s[-1] * 2) for n, s in shapes.items()})


def _prepare(cache: Path) -> None:
    """Write the rows and the base of lora_tiny as a run prepares them; a folder named damaged_X has a changed X."""
    with _in(cache.parent, {"DATADIR": str(cache), "MODEL": str(cache)}):
        plan = plan_kinds.required(compose(["task=lora_tiny"]), TrainingPlan)
    assert plan.base is not None
    for needed in (plan, plan.base):
        rows, data = Path(str(needed.data_dir)), needed.config.training_data
        rows.mkdir(parents=True)
        for split, count in (("train", data.num_train_rows), ("eval", data.eval_rows)):
            np.save(rows / f"{split}_tokens.npy", np.zeros((count, data.seq_length), dtype=np.int32))
            np.save(rows / f"{split}_counts.npy", np.ones((count, data.seq_length), dtype=bool))
        checksums.write(rows, sorted(path.name for path in rows.iterdir()))
    base = Path(str(plan.base_dir))
    base.mkdir(parents=True)
    (base / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (base / "__0_0.distcp").write_bytes(bytes(2_000_000))
    checksums.write(base, ["__0_0.distcp", "metadata.json"])
    if cache.name == "damaged_rows":
        os.truncate(Path(str(plan.data_dir)) / "train_tokens.npy", 1000)
    if cache.name == "damaged_base":
        with (base / "__0_0.distcp").open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"junk")


SITE = {
    "gpu/bare": "name: my GPU\nmemory_gib: 48\n",
    "gpu/nomemory": "name: my GPU\npeak_bf16_tflops: 300\nsource: mine\n",
    "gpu/mine": "name: my GPU\nmemory_gib: 48\npeak_bf16_tflops: 300\nsource: mine\nrates: null\n",
    "model/odd": "defaults: [tiny, _self_]\nhead_dims: 8\n",
    "model/relu": "defaults: [tiny, _self_]\nactivation: gelu_tanh\n",
    "cluster/early": "# @package _global_\ndefaults: [{override /gpu@cluster.gpu: h200}, local]\n",
    "cluster/broken": "# @package _global_\ncluster: {name: [\n",
    "task/mine": "# @package _global_\ndefaults: [lora_tiny, _self_]\nrecipe: {learning_rate: 0.1}\n",
}
"""Files of a site's own config folder, most of them wrong."""


def _site(folder: Path) -> None:
    for name, text in SITE.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
