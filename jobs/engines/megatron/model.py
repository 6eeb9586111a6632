"""Build this rank's part of the model and its optimizer."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from bench.contract.layers import Layer, has_fp8_head, layer_of
from bench.contract.model import Activation, Model, Position
from bench.contract.modules import Part
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Precision
from jobs.engines.megatron import data_parallel, device_ops, graphs, layer, lora
from jobs.engines.megatron.adam import Adam
from jobs.engines.megatron.data_parallel import UpdatedWeights
from jobs.engines.megatron.frozen.head import Fp8Head
from jobs.engines.megatron.frozen.layer import Fp8Layer
from jobs.engines.megatron.frozen.ops import Fp8Ops
from jobs.engines.megatron.hand_written_layer import HandWrittenLayer
from jobs.engines.megatron.loss import cross_entropy
from jobs.engines.megatron.offload import HostActivations, is_offloaded
from jobs.engines.megatron.trained.ops import LinearWeights, TrainedOps
from jobs.local_sgd import groups
from jobs.profiles.ranges import profile_range
from jobs.ranks import rank_times

Ops = Fp8Ops | TrainedOps
"""The operations of the hand-written layers: with frozen linears, or with all weights trained."""


@dataclass(slots=True)
class ModelAndOptimizer:
    """The model chunks of this rank (one, or vpp of them) and their optimizer."""

    plan: TrainingPlan
    chunks: list[DistributedDataParallel]
    optimizer: Adam
    updated_weights: UpdatedWeights
    training_pass: graphs.TrainingPass | None
    """Forward and backward pass of a micro-batch; None: megatron-core's pipeline schedule is used."""

    @property
    def device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    def unwrapped_chunks(self) -> list[GPTModel]:
        """Return the chunks without the wrappers for DP and BF16, with all weights of the last update."""
        self.updated_weights.wait()
        return [_unwrap(chunk) for chunk in self.chunks]

    def refresh_weights(self) -> None:
        """Update copies of the weights. Call this after every change of the weights except an optimizer step."""
        self.updated_weights.refresh()


class _Model(GPTModel):
    """megatron-core's GPT model, with a loss that makes no FP32 copy of the logits."""

    fp8_head: Fp8Head | None = None
    """Computes logits and loss of training passes in FP8; `_build_chunk` sets it on the last stage."""

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        """Return the same as megatron-core, but with a document mask the angles of RoPE [S, B, 1, D] by position."""
        output: tuple[Any, ...] = super()._preprocess(
            input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **others
        )
        freqs = output[1]
        if packed_seq_params is None or freqs is None:
            return output
        return output[0], freqs[position_ids.T].squeeze(2), *output[2:]

    def _postprocess(self, hidden_states: Tensor, labels: Tensor, **others: Any) -> Tensor:
        """Return the same as megatron-core: the hidden states, or on the last stage the loss [B, S]."""
        if self.fp8_head is None or not torch.is_grad_enabled():
            output: Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
            return output
        return self.fp8_head.losses(hidden_states, labels)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss [B, S] of logits [S, B, V / tp] and labels [B, S]."""
        num_rows, batch, _ = logits.shape
        with profile_range(Part.loss):
            return cross_entropy(logits.flatten(0, 1), labels.T.flatten()).view(num_rows, batch).T.contiguous()


def build(plan: TrainingPlan, seed: int, *, ops: Ops | None = None) -> ModelAndOptimizer:
    """Return model and optimizer with random weights of this seed; the process groups must exist.

    ops: the operations of the layers; by default those for this rank's device and the plan's precision.
    """
    seed_all(seed, group=0)  # all groups start from the same weights
    ops = ops or _ops(plan, torch.device(torch.cuda.current_device()))
    config = layer_config(plan, ops)
    chunks = [_build_chunk(plan, config, ops, stage, seed) for stage in range(plan.world.vpp)]
    wrapped = data_parallel.wrap(plan, config, chunks)
    config.finalize_model_grads_func = reduce_gradients
    models = [_unwrap(chunk) for chunk in wrapped]
    linear_weights = _share_linear_weights(models, ops)
    updated_weights = UpdatedWeights(wrapped, models, linear_weights, is_captured=plan.cuda_graph)
    training_pass = graphs.training_pass(plan, wrapped[0]) if plan.world.pp == 1 else None
    parts = ModelAndOptimizer(plan, wrapped, Adam(plan, wrapped), updated_weights, training_pass)
    parts.refresh_weights()
    return parts


def reduce_gradients(*args: Any, **others: Any) -> None:
    """Reduce the gradients over the replicas: here a rank waits for slower ones."""
    with rank_times.waiting():
        finalize_model_grads(*args, **others)


def seed_all(seed: int, *, group: int | None = None) -> None:
    """Seed this rank's generators; replicas, pipeline stages and local SGD groups draw different dropout masks."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    group = groups.number() if group is None else group
    replica += group * parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    own = seed + 1000 * replica + 100_000 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own, force_reset_rng=True)


def layer_config(plan: TrainingPlan, ops: Ops | None) -> layer.LayerConfig:
    """Return megatron-core's configuration of a plan."""
    m, w, dtype = plan.config.model, plan.world, _dtype(plan, ops)
    full, is_swiglu = plan.recompute.full, m.activation is Activation.swiglu
    return layer.LayerConfig(
        lora=plan.config.training.lora,
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups,
        normalization=m.norm.name,
        layernorm_epsilon=m.norm_epsilon,
        gated_linear_unit=is_swiglu,
        activation_func=torch.nn.functional.silu if is_swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=is_swiglu,  # saves gate and up only; GELU would become its tanh approximation
        add_bias_linear=m.bias,
        kv_channels=m.head_size,
        add_qkv_bias=m.qkv_bias,
        qk_layernorm=m.qk_norm,  # TP ranks then add up the gradients of these norms over their heads
        init_method_std=math.sqrt(2 / (5 * m.hidden_size)),  # SmallInit (Nguyen and Salazar, 2019)
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=w.tp,
        pipeline_model_parallel_size=w.pp,
        virtual_pipeline_model_parallel_size=w.vpp if w.vpp > 1 else None,
        context_parallel_size=w.cp,
        expert_model_parallel_size=w.ep,
        sequence_parallel=w.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # The interleaved schedule with batched sends mixes up messages if pp is 2: send and receive separately.
        overlap_p2p_comm=w.vpp > 1,
        batch_p2p_comm=w.vpp == 1,
        recompute_granularity="full" if full else None,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        gradient_accumulation_fusion=False,
        **_moe_settings(m),
    )


def _moe_settings(m: Model) -> dict[str, Any]:
    """Return megatron-core's settings of a mixture of experts."""
    experts = m.experts
    if experts is None:
        return {}
    # megatron-core adds the losses of all layers, each divided by k; runstop's coefficient is that of their mean.
    aux_loss_coef = experts.aux_loss_coef * experts.experts_per_token / m.num_layers
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # The softmax over the k best logits is the softmax over all, divided by the sum of the k best.
        "moe_router_pre_softmax": not experts.normalize_top_k,
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coef else "none",
        "moe_aux_loss_coeff": aux_loss_coef,
        "moe_token_dispatcher_type": dispatcher(),
    }


def dispatcher() -> str:
    """Return megatron-core's name of the dispatcher of tokens to experts.

    All-to-all sends each token only to the ranks of its experts. On one rank there is nothing to send, and all-gather
    needs less memory: docs/results/2026-11-26-families.md. The all-to-all dispatcher of 0.16.1 creates a CUDA stream,
    so CPUs need the all-gather one.
    """
    is_split = parallel_state.get_expert_model_parallel_world_size() > 1
    return "alltoall" if is_split and torch.cuda.is_available() else "allgather"


def _build_chunk(
    plan: TrainingPlan, config: layer.LayerConfig, ops: Ops | None, stage: int, seed: int
) -> torch.nn.Module:
    m = plan.config.model
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    num_layers = m.num_layers // (plan.world.pp * plan.world.vpp)
    model = _Model(
        config,
        TransformerBlockSubmodules(layer_specs=_layer_specs(plan, ops, num_layers), layer_norm=layer.Norm),
        vocab_size=m.vocab_size,
        max_sequence_length=m.max_seq_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=m.tied_embeddings,
        position_embedding_type="rope" if m.position is Position.rope else "learned_absolute",
        rotary_base=m.rope_base,
        rope_scaling=m.rope_scaling_factor != 1,
        rope_scaling_factor=m.rope_scaling_factor,
        vp_stage=stage if plan.world.vpp > 1 else None,
    ).to(torch.cuda.current_device())
    _share_host_memory(model)
    if config.lora is not None:
        lora.freeze_base(model)
        lora.init_adapters(model, seed)
        if first and plan.recompute.full:
            # Recomputed layers propagate gradients only if their input requires them; a frozen embedding's does not.
            model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
        if last and has_fp8_head(plan.config):
            model.fp8_head = Fp8Head(model.output_layer, cast(Fp8Ops, ops), config.sequence_parallel)
    chunk: torch.nn.Module = Float16Module(config, model) if config.bf16 else model
    return chunk


def _ops(plan: TrainingPlan, device: torch.device) -> Ops | None:
    """Return the operations of a plan's layers; None: megatron-core's layers are used."""
    if _is_trained(plan):
        return device_ops.trained_ops(device, plan.config.precision)
    if layer_of(plan.config) is not Layer.frozen:
        return None
    return device_ops.frozen_ops(device, plan.config.precision, plan.config.training.trains)


def _layer_specs(plan: TrainingPlan, ops: Ops | None, num_layers: int) -> list[ModuleSpec]:
    """Return the layer specs of a chunk: its first layers recompute; a rank's chunks recompute equally many."""
    num_per_rank = plan.recompute.qkv_layers, plan.recompute.fc1_layers, plan.recompute.offloaded_layers
    qkv, fc1, offloaded = (math.ceil(n / plan.world.vpp) for n in num_per_rank)
    lora = plan.config.training.lora
    if ops is None:
        return [layer.megatron_spec(plan.config.model, lora)] * num_layers
    if _is_trained(plan):
        spec = partial(layer.trained_spec, cast(TrainedOps, ops))
    else:
        assert lora is not None
        spec = partial(layer.lora_spec, lora, cast(Fp8Ops, ops))
    spec = partial(spec, qk_norm=plan.config.model.qk_norm)
    return [
        spec(recompute_qkv=i < qkv, recompute_fc1=i < fc1, offload=is_offloaded(i, offloaded, num_layers))
        for i in range(num_layers)
    ]


def _share_host_memory(model: GPTModel) -> None:
    """Let the layers of a chunk share one `HostActivations`, if any of them offloads."""
    layers = [one for one in model.decoder.layers if isinstance(one, HandWrittenLayer)]
    if any(one.offload for one in layers):
        host = HostActivations(torch.device(torch.cuda.current_device()))
        for one in layers:
            one.host = host


def _share_linear_weights(chunks: list[GPTModel], ops: Ops | None) -> LinearWeights | None:
    """Let all hand-written layers share one source of weights, in the order of the backward pass.

    Return the source for trained layers; None for frozen layers, whose weights never change.
    """
    if ops is None:
        return None
    layers = [one for chunk in chunks for one in chunk.decoder.layers]
    linears = [linear for one in reversed(layers) for linear in one.backward_linears]
    if isinstance(layers[0], Fp8Layer):
        weights = cast(Fp8Ops, ops).frozen_weights(linears)
        for one in layers:
            one.weights = weights
        return None
    linear_weights = cast(TrainedOps, ops).linear_weights(linears)
    for one in layers:
        one.linear_weights = linear_weights
    return linear_weights


def _dtype(plan: TrainingPlan, ops: Ops | None) -> torch.dtype:
    """Return the data type of activations and of unquantised weights."""
    if ops is not None:
        return cast(TrainedOps, ops).dtype if _is_trained(plan) else cast(Fp8Ops, ops).output_dtype
    return torch.float32 if plan.config.precision is Precision.fp32 else torch.bfloat16


def _is_trained(plan: TrainingPlan) -> bool:
    return layer_of(plan.config) is Layer.trained


def _unwrap(chunk: torch.nn.Module) -> GPTModel:
    inner = chunk.module
    return inner.module if isinstance(inner, Float16Module) else inner
