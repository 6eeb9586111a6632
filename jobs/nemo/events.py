"""Lightning's callback that writes our log: the same records at the same places as `jobs.tasks.train`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from nemo.lightning.pytorch.strategies.utils import init_model_parallel
from torch import Tensor

from bench.contract import checksums, mllog, run_files
from bench.contract import plan as plans
from bench.contract.plan_kinds import TrainingPlan
from jobs.data import rows as rows_of
from jobs.engines import WarmUpTimes
from jobs.nemo import recipe, weights
from jobs.nemo.rows import micro_batches
from jobs.ranks import process_group, timing, transport
from jobs.ranks.program import Begun
from jobs.ranks.watchdog import EVALUATION, LOADING, SAVING, TRAINING, Alive
from jobs.tasks import inputs, train


class Events(pl.Callback):
    """Loads weights, warms up, decides at which steps Lightning evaluates and when it stops, and logs all of it.

    alive is called with the progress of this rank, warmed_up with the times of the warm-up.
    """

    def __init__(self, begun: Begun[TrainingPlan], *, alive: Alive, warmed_up: Callable[[WarmUpTimes], object]) -> None:
        self._begun, self._plan, self._trial, self._log = begun, begun.plan, begun.trial, begun.log
        self._alive, self._warmed_up = alive, warmed_up
        self._order = rows_of.train_order(begun.plan, begun.trial.seed)
        self._rows: rows_of.Rows | None = None
        self._pace: timing.Pace | None = None
        self._summed: Tensor | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Create megatron-core's groups and set the seeds: NeMo skips this if a process group exists or on CPUs."""
        init_model_parallel(pl_module)
        own = self._trial.seed + 100 * get_pipeline_model_parallel_rank()  # as NeMo does, with the trial's seed
        torch.manual_seed(own)
        model_parallel_cuda_manual_seed(own, force_reset_rng=True)

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Load the base checkpoint before NeMo adds adapters to the model, and set the steps with an evaluation."""
        if self._plan.base_dir is not None:
            weights.load(_bare(trainer.strategy.megatron_parallel[0]), Path(self._plan.base_dir), self._plan.config)
            for optimizer in trainer.optimizers:  # there are none yet if adapters are trained
                optimizer.mcore_optimizer.reload_model_params()
        at_steps = self._plan.evaluation.at_steps
        trainer.fit_loop.epoch_loop._should_check_val_fx = lambda fetcher: trainer.global_step in at_steps

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before the first step: warm up and start the timed part."""
        if self._pace is not None:
            return
        model = trainer.strategy.megatron_parallel
        if self._plan.recompute.full and self._plan.config.training.lora is not None:
            _require_input_gradients(_bare(model[0]))
        if (usual := warm_up(self._plan, model)) is not None:
            self._warmed_up(usual)
        recipe_info = {"engine": self._plan.config.engine.name.name, "recipe": recipe.chosen(self._plan)}
        self._log.event(mllog.STRATEGY, "megatron", **recipe_info, rank_bytes=_rank_bytes(model))
        transport.log_used(self._plan, self._begun.who, self._begun.folder, self._log)
        timing.settle()
        timing.forget_memory()
        self._log.stop(mllog.INIT_STOP)
        self._log.start(mllog.RUN_START)
        self._alive(LOADING, 0, None)
        self._rows, _ = inputs.open_rows(self._plan, self._log, seed=self._trial.seed)
        self._pace = train.begin(self._plan, self._log, 0, self._alive)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the step; finish after the last one unless an evaluation follows."""
        assert self._pace is not None and self._rows is not None
        plan, step = self._plan, trainer.global_step
        self._alive(TRAINING, step, self._pace.stepped(rows_of.real_tokens(self._rows, next(self._order))))
        if step % plan.config.training_recipe.log_every_steps == 0 or step == plan.max_steps:
            self._pace.log(step, outputs["loss"].item())
        if step == plan.max_steps and step not in plan.evaluation.at_steps:
            self._log.stop(mllog.BLOCK_STOP, **train.place(plan, step))
            self._finish(trainer, step, reached=False)

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._alive(EVALUATION, trainer.global_step, None)
        self._log.stop(mllog.BLOCK_STOP, **train.place(self._plan, trainer.global_step))
        self._log.start(mllog.EVAL_START, **train.place(self._plan, trainer.global_step))
        self._summed = torch.zeros(2, device=process_group.device())

    def on_megatron_microbatches_end(self, step: Any, microbatch_outputs: list[dict[str, Tensor]]) -> None:
        """Add up the losses and the rows of an evaluation; only the last pipeline stage has any."""
        if self._summed is not None:
            for output in microbatch_outputs:
                self._summed += output["loss_sum_and_ub_size"]

    def on_validation_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Log the evaluation, and continue or stop. TP ranks count the same rows, which cancels out in the quotient."""
        assert self._summed is not None and self._pace is not None
        torch.distributed.all_reduce(self._summed)
        loss_sum, num_rows = self._summed.tolist()
        self._summed = None
        plan, step = self._plan, trainer.global_step
        loss = train.log_evaluation(plan, loss_sum / num_rows, step, self._log)
        self._alive(TRAINING, step, None)
        reached = plan.config.training.is_reached_by(loss)
        if reached or step == plan.max_steps:
            self._finish(trainer, step, reached=reached)
            return
        self._log.start(mllog.BLOCK_START, **train.place(plan, step))
        self._pace.restart(step)

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Log the memory peaks, and save the adapters."""
        timing.log_memory(self._plan, self._log)
        if plans.keeps_adapters(self._plan.config):
            folder = self._begun.folder / run_files.adapters(self._trial.index)
            weights.save(self._plan, [_bare(chunk) for chunk in trainer.strategy.megatron_parallel], folder)
            if self._begun.who.rank == 0:
                self._log.attach(folder / checksums.MANIFEST)

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End this rank at once; Lightning would first tear down the model."""
        self._begun.guard.fail(exception)

    def _finish(self, trainer: Any, step: int, *, reached: bool) -> None:
        is_success = reached or not self._plan.config.training.has_target
        self._log.finish("success" if is_success else "aborted", **train.place(self._plan, step))
        self._alive(SAVING, step, None)
        trainer.should_stop = True


def warm_up(plan: TrainingPlan, model: Any) -> WarmUpTimes | None:
    """Run forward and backward, and an evaluation, on synthetic rows; return the times of the last iteration.

    Weights and random generators do not change. NeMo's optimizer takes its first step in the run.
    """
    rows = rows_of.synthetic(plan)
    indices = np.arange(plan.batch.global_batch_size)
    times = None
    with _same_generators():
        for _ in range(plan.config.training_recipe.warmup_iterations):
            for chunk in model:
                chunk.zero_grad_buffer()
            start_s = timing.device_time_s()
            model.training_step(iter(micro_batches(plan, rows, indices)))
            trained_s = timing.device_time_s()
            with torch.no_grad():
                model.validation_step(iter(micro_batches(plan, rows, indices)))
            times = WarmUpTimes(step_s=trained_s - start_s, eval_batch_s=timing.device_time_s() - trained_s)
    return times


def _require_input_gradients(model: Any) -> None:
    """Make the output of a frozen embedding require gradients, so that recomputed layers train their adapters."""
    if hasattr(model, "embedding"):
        model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())


@contextmanager
def _same_generators() -> Iterator[None]:
    """Restore all random generators afterwards."""
    tracker = get_cuda_rng_tracker()
    host, device, tracked = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
    yield
    torch.set_rng_state(host)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(device)
    tracker.set_states(tracked)


def _rank_bytes(model: Any) -> list[int]:
    """Return the bytes of the weights on each rank; all ranks call this together."""
    own = sum(parameter.numel() * parameter.element_size() for chunk in model for parameter in chunk.parameters())
    held = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(held, own)
    return held


def _bare(model: Any) -> Any:
    """Return megatron-core's model without the wrappers of NeMo, DDP and BF16."""
    while hasattr(model, "module"):
        model = model.module
    return model
