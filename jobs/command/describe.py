"""Log what a program is, what it got from the plan, and the system it runs on; without torch, which it may not have."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import atomic_files, checksums, mllog, run_files
from bench.contract import plan as plans
from bench.contract.plan import Trial
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.plan_paths import expanded
from bench.contract.program import Program, placeholders
from bench.contract.schema import DataSource, Device, GpuVendor
from bench.contract.training import StartsFrom
from jobs.node_checks import facts, hardware
from jobs.ranks.identity import node_name
from jobs.ranks.program import Begun
from jobs.tasks import describe
from jobs.tasks import inputs as checked

if TYPE_CHECKING:
    from jobs.ranks.telemetry import Sampler

MAX_HASHED_BYTES = 64 << 20
"""A larger word of argv is data, not a program."""


def program(filled: Program, settings: Program, log: mllog.Writer) -> None:
    """Log the program's words, and the checksums of its files among them."""
    names = sorted({name for _, text in settings.texts() for name in placeholders(text)})
    how = {"per": filled.per.name, "adapter": filled.adapter.name, "placeholders": names}
    rules = {} if settings.ruleset is None else {mllog.RULESET: settings.ruleset}
    log.event(mllog.PROGRAM, settings.argv, **how, **rules)
    for argument in dict.fromkeys(filled.argv[1:]):
        path = Path(filled.folder or ".", argument)
        if path.is_file() and path.stat().st_size <= MAX_HASHED_BYTES:
            log.event(mllog.INPUT_SHA256, atomic_files.sha256(path), input=f"program {path.name}")


def inputs(plan: TrainingPlan, log: mllog.Writer) -> None:
    """Check the rows and weights of the plan whose folders the program gets, and log their checksums.

    The program reads them itself, so whole files are compared with the checksums from when they were written.

    Raises:
        ConfigError: they are missing, are not those of the plan, or were changed.
    """
    if plan.base_dir is not None and plan.config.training.starts_from is not StartsFrom.program:
        checked.check_weights(plan, log, None)
    if plan.data_dir is None or plan.data.source is DataSource.program:
        return
    folder = Path(expanded(plan.data_dir) or plan.data_dir)
    known = checksums.listed(folder)
    if differing := checksums.differing(checksums.of_files(folder, known), known):
        raise checksums.changed(f"the rows were changed: {differing}", folder, fix="prepare or copy the rows again")
    checked.open_rows(plan, log)


def trial(plan: TrainingPlan, trial: Trial) -> dict[str, Any]:
    """Return what describes the trial: the submission, the batch, what the program got by placeholders, the system."""
    settings = plan.config.program
    assert settings is not None
    data, peak = plan.data, plan.peak_tflops if plan.tflop_per_sample else None
    described = {
        mllog.INITIAL_WEIGHTS: plan.config.training.starts_from.name,
        mllog.DATA_SOURCE: data.source.name,
        **describe.submission(plan, trial),
        mllog.GLOBAL_BATCH_SIZE: plan.batch.global_batch_size,
        mllog.TRAIN_SAMPLES: data.train_rows or None,
        mllog.EVAL_SAMPLES: data.eval_rows or None,
        "max_sequence_length": data.seq_length or None,
        mllog.CONFIG_FILENAME: f"task/{plan.config.task.name}.yaml",
        mllog.MODEL_TFLOP_PER_SAMPLE: plan.tflop_per_sample,
        mllog.ACCELERATOR_PEAK_TFLOPS: peak,
        **_passed(plan, settings),
        **system(plan),
    }
    return {key: value for key, value in described.items() if value is not None}


def _passed(plan: TrainingPlan, settings: Program) -> dict[str, Any]:
    """Return the settings that the program got; the others may differ from what it uses."""
    values = {
        "micro_batch_size": (mllog.MICRO_BATCH_SIZE, plan.batch.micro_batch_size),
        "gradient_accumulation_steps": (mllog.GRADIENT_ACCUMULATION_STEPS, plan.batch.gradient_accumulation_steps),
        "lr": (mllog.OPT_BASE_LEARNING_RATE, plan.recipe.lr),
        "tp": (mllog.TENSOR_PARALLELISM, plan.world.tp),
        "pp": (mllog.PIPELINE_PARALLELISM, plan.world.pp),
        "cp": (mllog.CONTEXT_PARALLELISM, plan.world.cp),
    }
    return {key: value for name, (key, value) in values.items() if settings.uses(name)}


def system(plan: TrainingPlan) -> dict[str, Any]:
    """Return the hardware, the operating system and runstop's commit, on rank 0's node."""
    return {
        "num_ranks": plan.world.num_ranks,
        "accelerator": _accelerator(plan),
        "host_processor_model_name": hardware.cpu_model(),
        "operating_system": hardware.operating_system(),
        "commit": describe.commit(describe.ROOT, facts.IMAGE),
        **describe.price(plan),
    }


def _accelerator(plan: TrainingPlan) -> str | None:
    """Return the name of the node's GPUs by their driver; None if it does not answer."""
    if plan.config.cluster.device is not Device.cuda:
        return "cpu"
    listed, _, _ = hardware.gpus()
    return listed[0].name if listed else None


class Telemetry:
    """Samples the GPUs of node 0 while the program runs; the other nodes are not sampled."""

    def __init__(self, begun: Begun[TrainingPlan]) -> None:
        config = begun.plan.config
        self._sampler: Sampler | None = None
        self._why = ""
        if not config.launch.telemetry or config.cluster.device is not Device.cuda or begun.who.rank != 0:
            return
        is_amd = config.cluster.gpu is not None and config.cluster.gpu.vendor is GpuVendor.amd
        uuids = _uuids(plans.gpus_per_node(begun.plan))
        if is_amd or not uuids:
            self._why = "the driver does not name the GPUs of this node"
            return
        from jobs.ranks import telemetry

        self._sampler = telemetry.Sampler(begun.folder / run_files.telemetry(begun.trial.index, node_name()), uuids)
        self._sampler.wait_for_first()  # run_start is the start of the program

    def log(self, log: mllog.Writer) -> None:
        """Log the record of this node, and attach its samples; after run_stop."""
        if self._sampler is not None:
            log.event(mllog.GPU_TELEMETRY, self._sampler.summary(log), node=node_name())
            if self._sampler.file.exists():
                log.attach(self._sampler.file)
        elif self._why:
            log.event(mllog.GPU_TELEMETRY, {mllog.NOT_MEASURED: self._why}, node=node_name())


def _uuids(num_gpus: int) -> Sequence[str]:
    """Return the UUIDs of the node's first GPUs, as CUDA writes them; empty if the driver does not answer."""
    listed, _, _ = hardware.gpus()
    return [gpu.uuid.removeprefix("GPU-") for gpu in (listed or ())[:num_gpus] if gpu.uuid]
