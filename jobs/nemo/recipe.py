"""NeMo's own recipes with the settings of a plan: LoRA, fine-tuning, pre-training (Llama 2, GPT-3)."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import fiddle
import nemo_run
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from nemo import lightning as nl
from nemo.collections.llm.gpt.model.base import local_layer_spec
from nemo.lightning.pytorch.optim import LRSchedulerModule
from torch.optim.lr_scheduler import LambdaLR

from bench.contract import plan_kinds
from bench.contract.model import Norm, Position
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Device, Precision
from bench.contract.training import StartsFrom, Trains
from jobs.nemo import cpu_patch
from jobs.nemo.rows import RowLoss, RowsModule
from jobs.ranks.identity import Rank


def fitting(plan: TrainingPlan, who: Rank, *, data: RowsModule, callback: Any, folder: Path) -> Callable[[], Any]:
    """Return the recipe as a callable that trains, with our rows and callback; folder: of NeMo's own log."""
    recipe = _recipe(plan)
    _set_model(plan, recipe.model.config)
    _set_trainer(plan, who, recipe.trainer)
    _set_strategy(plan, recipe.trainer.strategy)
    _set_optimizer(plan, recipe.optim.config)
    if plan.config.training.lora is not None:
        _set_adapters(plan, recipe.peft)
    recipe.resume = None  # our callback loads the base checkpoint
    recipe.log = nemo_run.Config(nl.NeMoLogger, explicit_log_dir=str(folder))
    recipe.data = data
    built: partial[Any] = fiddle.build(recipe)
    parts = built.keywords
    parts["trainer"].callbacks.append(callback)
    parts["optim"].lr_scheduler = _Schedule(plan)
    parts["model"]._training_loss_reduction = parts["model"]._validation_loss_reduction = RowLoss()
    return built


def chosen(plan: TrainingPlan) -> str:
    """Return the module and function of NeMo's recipe for this kind of training."""
    training = plan.config.training
    if plan.config.model.position is Position.learned:
        return "gpt3_175b.pretrain_recipe"
    is_new = training.trains is Trains.all and training.starts_from is StartsFrom.random
    return "llama2_7b.pretrain_recipe" if is_new else "llama2_7b.finetune_recipe"


def _recipe(plan: TrainingPlan) -> Any:
    """Return the recipe with its default settings."""
    module, _, function = chosen(plan).partition(".")
    size: dict[str, Any] = {"num_nodes": plan.world.num_nodes, "num_gpus_per_node": plan.world.ranks_per_node}
    if function == "finetune_recipe":
        size["peft_scheme"] = "none" if plan.config.training.lora is None else "lora"
    return getattr(import_module(f"nemo.collections.llm.recipes.{module}"), function)(**size)


def _set_model(plan: TrainingPlan, config: Any) -> None:
    """Set the sizes of the model; without Transformer Engine and Apex, use megatron-core's own layers."""
    m = plan.config.model
    config.num_layers, config.hidden_size, config.ffn_hidden_size = m.num_layers, m.hidden_size, m.ffn_hidden_size
    config.num_attention_heads, config.num_query_groups = m.num_attention_heads, m.num_query_groups
    config.vocab_size, config.seq_length = m.vocab_size, m.max_seq_length
    config.layernorm_epsilon, config.rotary_base = m.norm_epsilon, m.rope_base
    config.add_bias_linear, config.share_embeddings_and_output_weights = m.bias, m.tied_embeddings
    config.use_transformer_engine_full_layer_spec = False  # GPT-3's recipe requests one that NeMo 2.7.3 no longer has
    if plan.recompute.full:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    if plan.config.cluster.device is Device.cuda:
        return
    config.transformer_layer_spec = local_layer_spec
    if m.norm is Norm.LayerNorm:
        config.layernorm_zero_centered_gamma = False  # the same function, with weights around 1 instead of 0
    for fusion in _FUSIONS:
        setattr(config, fusion, False)


_FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
"""Fusions that need a GPU."""


def _set_trainer(plan: TrainingPlan, who: Rank, trainer: Any) -> None:
    """Set Lightning's steps and devices. Our log replaces its progress bar and loggers."""
    trainer.accelerator = "gpu" if plan.config.cluster.device is Device.cuda else "cpu"
    if plan.config.precision is Precision.fp32:
        trainer.plugins = nemo_run.Config(nl.MegatronMixedPrecision, precision="32")
    trainer.plugins = [trainer.plugins, _Environment(plan, who)]
    trainer.max_steps = plan.max_steps
    trainer.limit_val_batches = -(-plan.config.training_data.eval_rows // plan.batch.global_batch_size)
    trainer.val_check_interval = plan.evaluation.every_steps  # our callback selects among these steps
    trainer.check_val_every_n_epoch = None
    trainer.num_sanity_val_steps = 0
    trainer.enable_checkpointing = trainer.enable_progress_bar = trainer.enable_model_summary = trainer.logger = False


def _set_strategy(plan: TrainingPlan, strategy: Any) -> None:
    """Set the parallel layout. The logged loss is checked, so gradients are not checked at each step."""
    w = plan.world
    strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size = w.tp, w.pp
    strategy.virtual_pipeline_model_parallel_size = None
    strategy.context_parallel_size, strategy.sequence_parallel = w.cp, w.sp
    is_fp32 = plan.config.precision is Precision.fp32
    strategy.pipeline_dtype = (torch.float32 if is_fp32 else torch.bfloat16) if w.pp > 1 else None
    strategy.ckpt_async_save = False
    if not isinstance(strategy.ddp, nemo_run.Config):
        strategy.ddp = nemo_run.Config(nl.pytorch.strategies.megatron_strategy.DistributedDataParallelConfig)
    strategy.ddp.check_for_nan_in_grad = False
    if plan.config.cluster.device is not Device.cuda:
        strategy.ddp.average_in_collective = False  # gloo only sums


def _set_optimizer(plan: TrainingPlan, config: Any) -> None:
    r = plan.config.training_recipe
    config.lr, config.weight_decay, config.clip_grad = r.lr, r.weight_decay, r.clip_grad
    config.adam_beta1, config.adam_beta2, config.adam_eps = r.adam_beta1, r.adam_beta2, r.adam_eps
    config.bf16 = plan.config.precision is not Precision.fp32
    if not plan.config.parallel.distributed_optimizer:  # NeMo's LoRA recipe never sets this
        config.use_distributed_optimizer = False


def _set_adapters(plan: TrainingPlan, peft: Any) -> None:
    lora = plan.config.training.lora
    assert lora is not None
    cpu_patch.install_adapters()
    peft.dim, peft.alpha, peft.dropout = lora.rank, lora.alpha, lora.dropout
    peft.target_modules = list(lora.target_modules)
    peft.lora_A_init_method = "kaiming"  # as in LoRA's paper and engine=megatron; NeMo's default is Xavier


class _Schedule(LRSchedulerModule):
    """The plan's learning rates. NeMo's cosine schedule differs only in its warm-up, which is one step longer."""

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__()
        self._plan = plan

    def scheduler(self, model: Any, optimizer: Any) -> Any:
        base = self._plan.config.training_recipe.lr
        schedule = LambdaLR(optimizer, lambda done: plan_kinds.learning_rate(self._plan, done + 1) / base)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1}}


class _Environment(ClusterEnvironment):
    """Lightning's launcher interface; the ranks are already started and connected."""

    creates_processes_externally = True

    def __init__(self, plan: TrainingPlan, who: Rank) -> None:
        super().__init__()
        self._who, self._node = who, who.rank // plan.world.ranks_per_node

    @property
    def main_address(self) -> str:
        return self._who.master_addr

    @property
    def main_port(self) -> int:
        return self._who.master_port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._who.world_size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._who.rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._who.local_rank

    def node_rank(self) -> int:
        return self._node
