"""Parameter counts against published ones; memory estimates against arithmetic that can be done by hand."""

from dataclasses import asdict, replace
from enum import Enum
from itertools import pairwise
from typing import Any, get_type_hints

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.plan import Memory, Recomputed, World
from bench.contract.schema import (
    BackendName,
    Cluster,
    Config,
    Container,
    Data,
    DataSource,
    Device,
    Engine,
    EngineName,
    Gpu,
    Launch,
    Parallel,
    Paths,
    Precision,
    Runtime,
)
from bench.contract.task import Kind, Task
from bench.contract.training import Lora, MomentPrecision, Recipe, Recompute, StartsFrom, Training, Trains
from bench.planning import compose
from bench.planning.estimates import memory, parameters
from bench.planning.estimates.memory import NOTHING
from helpers.examples import in_proportion
from helpers.paths import ROOT

CONF = ROOT / "conf"
LORA = Lora(rank=16, alpha=32, dropout=0.1, target_modules=["linear_qkv", "linear_proj"])
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "gpt3_126m": 125_950_464,
    "gpt3_5b": 5_051_228_160,
}


def load_model(name: str) -> Model:
    hints = get_type_hints(Model)
    values: dict[str, Any] = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    for key, value in values.items():
        if isinstance(hints[key], type) and issubclass(hints[key], Enum):
            values[key] = hints[key][value]
    return Model(**values)


def load_gpu(cluster: str) -> Gpu:
    gpu = compose.compose(["task=lora70b", f"cluster={cluster}"]).config.cluster.gpu
    assert gpu is not None
    return gpu


H100, H200 = load_gpu("dgx1"), load_gpu("dgxh200")


MODELS = {name: load_model(name) for name in PARAMETERS}


def make_config(
    model: Model, parallel: Parallel, *, lora: Lora | None = None, gpu: Gpu | None = None, global_batch_size: int = 8
) -> Config:
    """Return a BF16 run on rows of 8192 tokens, micro-batches of one row."""
    return Config(
        task=Task(
            name="t",
            summary="t",
            kind=Kind.train,
            benchmark=None,
            submittable=False,
            training=Training(
                trains=Trains.lora if lora else Trains.all, starts_from=StartsFrom.random, lora=lora, max_steps=10
            ),
        ),
        model=model,
        data=Data(
            name="d",
            summary="d",
            source=DataSource.prepared,
            seq_length=8192,
            train_rows=100,
            eval_rows=10,
            answer_only=True,
        ),
        recipe=Recipe(
            global_batch_size=global_batch_size,
            micro_batch_size=1,
            lr=1e-4,
            lr_warmup_steps=0,
            weight_decay=0.0,
            clip_grad=1.0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            eval_every_samples=80,
        ),
        parallel=parallel,
        engine=Engine(name=EngineName.megatron),
        cluster=Cluster(
            name="c",
            summary="c",
            org="o",
            platform="p",
            status="onprem",
            backend=BackendName.local,
            device=Device.cuda if gpu else Device.cpu,
            num_nodes=1,
            ranks_per_node=8,
            paths=Paths(data=None, model=None, logs=None),
            gpu=gpu,
        ),
        container=Container(name="none", runtime=Runtime.none),
        launch=Launch(),
        trials=1,
        seed_base=1,
        precision=Precision.bf16,
        walltime=None,
    )


def with_recompute(config: Config, recompute: Recompute) -> Config:
    return replace(config, recipe=replace(config.recipe, recompute=recompute))


def world_of(config: Config, *, dp: int) -> World:
    """The split that config.parallel says, of as many ranks as that takes."""
    p = config.parallel
    assert p.tp and p.pp and p.cp and p.sp is not None
    size = dp * p.tp * p.pp * p.cp
    return World(num_nodes=1, ranks_per_node=size, num_ranks=size, dp=dp, tp=p.tp, pp=p.pp, cp=p.cp, vpp=p.vpp, sp=p.sp)


def estimate(config: Config, *, dp: int) -> Memory:
    world = world_of(config, dp=dp)
    return memory.estimate(config, world, memory.recompute(config, world))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Small models that every split of up to 4 ranks (TP and PP each) divides."""
    groups = draw(st.sampled_from([4, 8]))
    heads = groups * draw(st.sampled_from([1, 2]))
    return Model(
        name="m",
        source="s",
        num_layers=draw(st.sampled_from([8, 16])),
        hidden_size=heads * draw(st.sampled_from([8, 16])),
        ffn_hidden_size=draw(st.sampled_from([64, 192])),
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=draw(st.sampled_from([128, 4096])),
        max_seq_length=64,
        norm=draw(st.sampled_from(Norm)),
        norm_epsilon=1e-5,
        activation=draw(st.sampled_from(Activation)),
        position=draw(st.sampled_from(Position)),
        bias=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )


sizes = st.sampled_from([1, 2, 4])
modules = st.lists(st.sampled_from(["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]), min_size=1, unique=True)
loras = st.none() | st.builds(
    Lora, rank=st.sampled_from([1, 16]), alpha=st.just(32), dropout=st.sampled_from([0.0, 0.1]), target_modules=modules
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    pp = draw(sizes)
    parallel = Parallel(
        tp=draw(sizes),
        pp=pp,
        cp=draw(sizes),
        vpp=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        sp=draw(st.booleans()),
        distributed_optimizer=draw(st.booleans()),
    )
    gpu = draw(st.none() | st.just(H100))
    batch = draw(st.sampled_from([8, 16, 64]))
    config = make_config(draw(models()), parallel, lora=draw(loras), gpu=gpu, global_batch_size=batch)
    return replace(config, precision=draw(st.sampled_from([Precision.fp32, Precision.bf16])))


@st.composite
def fused_configs(draw: st.DrawFn) -> Config:
    """Llamas under LoRA and models that are trained as a whole, in hand-written layers on a GPU."""
    config, trains = draw(configs()), draw(st.sampled_from(Trains))
    model, lora = config.model, None
    if trains is not Trains.all:
        lora = config.task.training.lora or LORA
        model = replace(model, norm=Norm.RMSNorm, activation=Activation.swiglu, position=Position.rope, bias=False)
    return replace(
        config,
        model=model,
        task=replace(config.task, training=replace(config.task.training, trains=trains, lora=lora)),
        cluster=replace(config.cluster, device=Device.cuda, gpu=H200),
        precision=Precision.bf16 if trains is Trains.qlora else draw(st.sampled_from([Precision.bf16, Precision.fp8])),
    )


def with_memory(config: Config, memory_gib: float) -> Config:
    """A GPU with so much room beyond what `fit` leaves free."""
    gpu = replace(H200, memory_gib=memory_gib + memory.FIT_MARGIN_GIB)
    return with_recompute(replace(config, cluster=replace(config.cluster, gpu=gpu)), Recompute.fit)


def some(qkv_layers: int, fc1_layers: int) -> Recomputed:
    return Recomputed(full=False, qkv_layers=qkv_layers, fc1_layers=fc1_layers)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_shipped_models(name: str) -> None:
    assert parameters.parameters(MODELS[name]) == PARAMETERS[name]
    assert MODELS[name].name == name


@pytest.mark.parametrize("name", ["gpt3_126m", "gpt3_5b"])
def test_gpt_parameters_by_the_papers_formula(name: str) -> None:
    """Narayanan et al. 2021: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), which leaves out the final norm."""
    model = MODELS[name]
    num_layers, hidden = model.num_layers, model.hidden_size
    formula = 12 * num_layers * hidden**2 + 13 * num_layers * hidden
    formula += (model.vocab_size + model.max_seq_length) * hidden
    assert parameters.parameters(model) == formula + 2 * hidden


def test_lora_parameters_of_70b() -> None:
    assert parameters.lora_parameters(MODELS["llama2_70b"], LORA) == 44_564_480


@given(model=models(), lora=loras, tp=sizes, pp=sizes)
def test_ranks_hold_the_model_and_their_replicas(model: Model, lora: Lora | None, tp: int, pp: int) -> None:
    stages = [parameters.rank_parameters(model, lora, tp=tp, pp=pp, pp_rank=k) for k in range(pp)]
    hidden, num_layers = model.hidden_size, model.num_layers
    norm = hidden * (2 if model.norm is Norm.LayerNorm else 1)
    replicated = (2 * num_layers + 1) * norm
    replicated += 2 * num_layers * hidden if model.bias else 0
    replicated += model.max_seq_length * hidden if model.position is Position.learned else 0
    copy = model.vocab_size * hidden if model.tied_embeddings and pp > 1 else 0
    assert tp * sum(base for base, _ in stages) == parameters.parameters(model) + (tp - 1) * replicated + copy
    if lora:
        whole = num_layers * len(lora.target_modules) * lora.rank * hidden  # qkv's and fc1's A, proj's and fc2's B
        total = parameters.lora_parameters(model, lora)
        assert tp * sum(adapters for _, adapters in stages) == total + (tp - 1) * whole
    else:
        assert all(adapters == 0 for _, adapters in stages)


@given(config=configs(), dp=sizes)
def test_total_is_the_sum_of_its_parts(config: Config, dp: int) -> None:
    result = estimate(config, dp=dp)
    parts = {key: value for key, value in asdict(result).items() if key.endswith("_gib") and key != "capacity_gib"}
    total = parts.pop("total_gib")
    assert total == pytest.approx(sum(parts.values()))
    assert all(value >= 0 for value in parts.values())
    assert result.fits is (None if config.cluster.gpu is None else total <= config.cluster.gpu.memory_gib)
    if config.task.training.lora is None:
        assert result.trainable_parameters == result.parameters == parameters.parameters(config.model)
        assert result.adapter_weights_gib == 0
    else:
        assert result.trainable_parameters == parameters.lora_parameters(config.model, config.task.training.lora)


SECOND_NEEDS_MOST = make_config(
    replace(MODELS["llama2_7b"], vocab_size=1024), Parallel(tp=1, pp=4, cp=1), lora=LORA, gpu=H200, global_batch_size=1
)
"""One micro-batch, whose input takes more than the first stage's small embedding."""


@example(config=SECOND_NEEDS_MOST, dp=1)
@given(config=configs(), dp=sizes)
def test_no_stage_needs_more_than_the_estimate(config: Config, dp: int) -> None:
    """Not each of them is looked at; the first of those that need the same is the estimate's."""
    world = world_of(config, dp=dp)
    recomputed = memory.recompute(config, world)
    needed = [sum(memory._parts(config, world, recomputed, rank).values()) for rank in range(world.pp)]
    assert memory.estimate(config, world, recomputed).total_gib == max(needed)


@pytest.mark.long
@given(config=configs(), dp=sizes)
def test_full_recompute_never_stores_more(config: Config, dp: int) -> None:
    full = estimate(with_recompute(config, Recompute.full), dp=dp)
    none = estimate(with_recompute(config, Recompute.none), dp=dp)
    assert full.activations_gib <= none.activations_gib * (1 + 1e-9)


@pytest.mark.long
@given(config=configs(), dp=sizes)
def test_distributed_optimizer_never_needs_more(config: Config, dp: int) -> None:
    whole, shard = (
        estimate(replace(config, parallel=replace(config.parallel, distributed_optimizer=on)), dp=dp)
        for on in (False, True)
    )
    assert shard.optimizer_gib <= whole.optimizer_gib * (1 + 1e-9)
    assert shard.total_gib <= whole.total_gib * (1 + 1e-9)


@given(config=configs(), dp=sizes)
def test_sequence_parallel_never_needs_more(config: Config, dp: int) -> None:
    off, on = (
        estimate(replace(config, parallel=replace(config.parallel, sp=sp)), dp=dp).total_gib for sp in (False, True)
    )
    assert on <= off * (1 + 1e-9)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "lora"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_more_tp_never_holds_more(name: str, lora: Lora | None, pp: int) -> None:
    held = [estimate(make_config(MODELS[name], Parallel(tp=tp, pp=pp, cp=1), lora=lora), dp=1) for tp in (1, 2, 4)]
    for few, many in pairwise(held):
        assert many.base_weights_gib <= few.base_weights_gib
        assert many.adapter_weights_gib <= few.adapter_weights_gib
        assert many.total_gib <= few.total_gib


def test_a_trained_gpt_layer_stores_34_h_minus_recomputation() -> None:
    """34 s b h less 2 of masks, 4 of the norms' outputs and 8 of the activation's; softmax and norm statistics; the
    inputs of the final norm and of the head."""
    model = MODELS["gpt3_5b"]
    result = estimate(make_config(model, Parallel(tp=1, pp=1, cp=1)), dp=8)
    per_token = 20 * model.hidden_size + 4 * model.num_attention_heads + 4 * 4
    head = 2 * 2 * model.hidden_size
    assert result.activations_gib * memory.GIB == pytest.approx(8192 * (model.num_layers * per_token + head))


def trained(model: str, precision: Precision, **recipe: Any) -> Config:
    config = make_config(MODELS[model], Parallel(tp=1, pp=1, cp=1), gpu=H200)
    return replace(config, precision=precision, recipe=replace(config.recipe, **recipe))


@pytest.mark.parametrize(
    ("precision", "per_token"),
    [
        (Precision.bf16, 2 * (2 * 4096 + 3 * 4096 + 4096 + 2 * 11008) + 2 * 4 + 4 * 32),
        (Precision.fp8, 2 * (2 * 4096 + 3 * 4096 + 4096) + 2 * 11008 + 2 * 4 + 2 * 4 + 4 * 32),
        (Precision.fp32, 4 * (2 * 4096 + 3 * 4096 + 4096 + 2 * 11008) + 2 * 4 + 4 * 32),
    ],
)
def test_a_trained_llama_layer_by_hand(precision: Precision, per_token: int) -> None:
    """Of Llama-2-7B: the residual twice, q, k, v, attention's output, gate and up, 1 / rms twice, 32 heads."""
    result = estimate(trained("llama2_7b", precision), dp=1)
    head = 2 * 4096 * (4 if precision is Precision.fp32 else 2)
    assert result.activations_gib * memory.GIB == pytest.approx(8192 * (32 * per_token + head))


def test_the_states_of_a_whole_model_by_hand() -> None:
    """Bytes a parameter of Llama-2-7B: BF16 weights 2, FP32 gradients 4, masters 4, moments 8, in BF16 4; FP8 copies of
    the layers' linears 1."""
    count, linears = PARAMETERS["llama2_7b"], 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)

    def states_gb(precision: Precision, *, dp: int = 1, **recipe: Any) -> tuple[float, ...]:
        m = estimate(trained("llama2_7b", precision, **recipe), dp=dp)
        return tuple(gib * memory.GIB / 1e9 for gib in (m.base_weights_gib, m.gradients_gib, m.optimizer_gib))

    gb = count / 1e9
    assert states_gb(Precision.bf16) == pytest.approx((2 * gb, 4 * gb, 12 * gb))
    assert states_gb(Precision.bf16, moments=MomentPrecision.bf16) == pytest.approx((2 * gb, 4 * gb, 8 * gb))
    assert states_gb(Precision.bf16, offload_moments=True) == pytest.approx((2 * gb, 4 * gb, 4 * gb + 8 * 2**26 / 1e9))
    assert states_gb(Precision.fp8, dp=8) == pytest.approx((2 * gb + linears / 1e9, 4 * gb, 12 * gb / 8))


def test_a_4_bit_base_by_hand() -> None:
    """QLoRA, section 3: 4 bits and 0.127 of scales for each weight of a linear; embedding, head and norms in BF16."""
    config = make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=LORA, gpu=H200)
    config.task.training.trains = Trains.qlora
    result, linears = estimate(config, dp=8), 80 * 8192 * (10240 + 8192 + 3 * 28672)
    held = linears * 4.127 / 8 + 2 * (PARAMETERS["llama2_70b"] - linears)
    assert result.base_weights_gib * memory.GIB == pytest.approx(held, rel=1e-4)
    per_token = 2 * 2 * 8192 + 2 * 4 + 2 * 10240 + 2 * 8192 + 4 * 64 + 2 * 57344 + 2 * 2 * 16
    assert result.activations_gib * memory.GIB == pytest.approx(8192 * 80 * per_token)
    buffers = result.workspace_gib - estimate(replace(config, task=lora_of(config)), dp=8).workspace_gib
    assert buffers * memory.GIB == pytest.approx(2 * 2 * 8192 * 57344)


def lora_of(config: Config) -> Task:
    return replace(config.task, training=replace(config.task.training, trains=Trains.lora))


WITH_BIASES = replace(MODELS["llama2_70b"], bias=True)
"""Biases make it a model of megatron-core's own layer."""


def test_activations_of_megatrons_lora_layer_by_hand() -> None:
    """Per token of Llama-2-70B: 2 norm inputs, qkv, q and k after RoPE and its angles, attention's output, gate
    and up, 64 heads, 2 adapters."""
    config = make_config(WITH_BIASES, Parallel(tp=1, pp=1, cp=1), lora=LORA)
    per_token = 2 * (2 * 8192 + 10240 + 9216 + 4 * 128 + 8192 + 57344) + 4 * 64 + 2 * (3 * 8192 + 2 * 16)
    assert estimate(config, dp=8).activations_gib * memory.GIB == pytest.approx(8192 * 80 * per_token)
    recomputed = estimate(with_recompute(config, Recompute.full), dp=8).activations_gib * memory.GIB
    assert recomputed == pytest.approx(8192 * (79 * 2 * 8192 + per_token))


def test_lora_without_dropout_stores_its_inputs() -> None:
    lora = replace(LORA, dropout=0.0)
    stored_gib = [
        estimate(make_config(WITH_BIASES, Parallel(tp=1, pp=1, cp=1), lora=lora), dp=8).activations_gib
        for lora in (lora, LORA)
    ]
    assert (stored_gib[1] - stored_gib[0]) * memory.GIB == pytest.approx(8192 * 80 * (8192 + 3 * 8192))


@pytest.mark.parametrize(
    ("pp", "vpp", "num_microbatches", "expected", "passed_on"),
    [
        (1, 1, 8, 1.0, 0),
        (4, 1, 8, 1.0, 4),  # the outputs of four micro-batches
        (4, 1, 2, 2 / 4, 4),  # fewer micro-batches than stages: the second stage, with inputs too, is the fullest
        (4, 2, 8, 1 + 3 / 8, 22),  # the inputs and outputs of 11 chunks
        (4, 4, 8, 1 + 3 / 16, 38),
        (2, 2, 2, 1.0, 8),  # every chunk of every micro-batch is in flight
    ],
)
def test_pipeline_depth_on_the_first_stage(
    pp: int, vpp: int, num_microbatches: int, expected: float, passed_on: int
) -> None:
    """In units of one micro-batch's activations in the whole model; plus hidden states between stages."""
    model = replace(MODELS["llama2_7b"], vocab_size=32)  # a small head leaves the first stage the fullest
    flat = estimate(make_config(model, Parallel(tp=1, pp=1, cp=1), lora=LORA, global_batch_size=1), dp=1)
    split = make_config(model, Parallel(tp=1, pp=pp, cp=1, vpp=vpp), lora=LORA, global_batch_size=num_microbatches)
    hidden_gib = 8192 * 4096 * 2 / memory.GIB
    stored_gib = estimate(split, dp=1).activations_gib - passed_on * hidden_gib
    assert stored_gib / flat.activations_gib == pytest.approx(expected)


def test_optimizer_and_gradients_of_full_training() -> None:
    config = make_config(MODELS["llama31_8b"], Parallel(tp=1, pp=1, cp=2))
    count = PARAMETERS["llama31_8b"]
    bf16 = estimate(config, dp=4)
    assert bf16.base_weights_gib * memory.GIB == pytest.approx(2 * count)
    assert bf16.gradients_gib * memory.GIB == pytest.approx(4 * count)
    assert bf16.optimizer_gib * memory.GIB == pytest.approx(12 * count / 8)
    fp32 = estimate(replace(config, precision=Precision.fp32), dp=4)
    assert fp32.base_weights_gib * memory.GIB == pytest.approx(4 * count)
    assert fp32.optimizer_gib * memory.GIB == pytest.approx(12 * count / 8)


def test_70b_lora_fits_80_gb_when_split_and_recomputed() -> None:
    parallel = Parallel(tp=4, pp=1, cp=2, sp=True)
    config = make_config(MODELS["llama2_70b"], parallel, lora=LORA, gpu=H100)
    result = estimate(with_recompute(config, Recompute.full), dp=1)
    assert result.fits is True
    assert result.base_weights_gib == pytest.approx(128.5 / 4, abs=0.1)
    assert result.capacity_gib == 79.6


def test_70b_does_not_fit_one_80_gb_gpu() -> None:
    config = make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=LORA, gpu=H100)
    result = estimate(with_recompute(config, Recompute.full), dp=8)
    assert result.fits is False
    assert result.base_weights_gib == pytest.approx(128.5, abs=0.1)


@pytest.mark.parametrize(
    ("tp", "cp", "recompute", "fits"),
    [
        (2, 1, Recompute.full, True),
        (2, 2, Recompute.none, True),
        (1, 2, Recompute.none, False),
    ],
)
def test_70b_lora_bf16_on_h200(tp: int, cp: int, recompute: Recompute, fits: bool) -> None:
    """BF16 weights are 128.5 GiB: two GPUs hold them with room for activations, one does not."""
    parallel = Parallel(tp=tp, pp=1, cp=cp, sp=tp > 1)
    config = make_config(MODELS["llama2_70b"], parallel, lora=LORA, gpu=H200)
    assert estimate(with_recompute(config, recompute), dp=2).fits is fits


SEVENTY_B_FP8 = replace(
    make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=LORA, gpu=H200), precision=Precision.fp8
)


def test_an_fp8_layer_by_hand() -> None:
    """Per token: 2 normalized inputs, qkv, attention, 64 heads, gate and up, scales and 1 / rms, 2 adapters."""
    result = estimate(SEVENTY_B_FP8, dp=8)
    per_token = 2 * 8192 + 2 * 10240 + 2 * 8192 + 4 * 64 + 2 * 28672 + 6 * 4 + 2 * 2 * 16
    assert result.activations_gib * memory.GIB == pytest.approx(8192 * 80 * per_token)
    linears = 80 * 8192 * (10240 + 8192 + 3 * 28672)
    assert result.base_weights_gib * memory.GIB == pytest.approx(2 * PARAMETERS["llama2_70b"] - linears)


def test_fp8_layers_free_what_they_recompute_and_split_the_rest() -> None:
    def activations(recomputed: Recomputed, parallel: Parallel = SEVENTY_B_FP8.parallel) -> float:
        config = replace(SEVENTY_B_FP8, parallel=parallel)
        return memory.estimate(config, world_of(config, dp=2), recomputed).activations_gib * memory.GIB

    everything = activations(NOTHING)
    assert everything - activations(some(1, 0)) == pytest.approx(8192 * 2 * 10240)
    assert everything - activations(some(80, 3)) == pytest.approx(8192 * (80 * 2 * 10240 + 3 * (2 * 28672 + 8)))
    staged, half_of_them = (
        Parallel(tp=1, pp=2, cp=1),
        some(40, 0),
    )  # the first stage holds two micro-batches of its 40 layers
    freed = activations(NOTHING, staged) - activations(half_of_them, staged)
    assert freed == pytest.approx(8192 * 80 * 2 * 10240)
    not_split = 80 * 8192 * (4 * 4 + 8 + 2 * 2 * 16)
    half = activations(NOTHING, Parallel(tp=2, pp=1, cp=1, sp=True))
    assert 2 * (half - not_split) == pytest.approx(everything - not_split)
    assert activations(NOTHING, Parallel(tp=1, pp=1, cp=4)) == pytest.approx(everything / 4)


def test_fp8_workspace_has_one_layer_and_two_transposed_weights() -> None:
    """Per token of the MLP: gate, up, activation and 8 h; if recomputed, gate and up and their gradients."""
    config = replace(SEVENTY_B_FP8, model=replace(SEVENTY_B_FP8.model, vocab_size=8))  # the loss is nothing

    def at_work(recomputed: Recomputed) -> float:
        needed = memory.estimate(config, world_of(config, dp=8), recomputed).workspace_gib
        return (needed - memory.CUDA_ALLOWANCE_GIB) * memory.GIB

    usual = 8192 * (4 * 28672 + 28672 + 8 * 8192) + 2 * 2 * 28672 * 8192
    assert at_work(some(80, 0)) == pytest.approx(usual)
    assert at_work(some(80, 1)) == pytest.approx(usual + 8192 * 3 * 28672)


def test_a_frozen_fp8_head_has_three_copies_and_a_gradient_next_to_the_logits() -> None:
    """The copies in FP8, one of them transposed, are split over tp, as the logits are. Hidden states are additional:
    in BF16 the embedding's output and the final norm's input and output, in FP8, going back, the norm's input."""
    model = MODELS["llama31_8b"]
    config = replace(make_config(model, Parallel(tp=2, pp=1, cp=1), lora=LORA, gpu=H200), precision=Precision.fp8)
    in_bf16 = replace(config, precision=Precision.bf16)
    fp8, bf16 = (memory.estimate(one, world_of(one, dp=1), NOTHING) for one in (config, in_bf16))
    head, layers = 128_256 * 4096, 218_103_808 * 32
    assert (fp8.base_weights_gib - bf16.base_weights_gib) * memory.GIB == pytest.approx((2 * head - layers) / 2)
    buffers = 2 * 28672 * 4096 / 2
    logits = [(one.workspace_gib - memory.CUDA_ALLOWANCE_GIB) * memory.GIB for one in (fp8, bf16)]
    hidden = 2 * 8192 * 4096
    expected = [3 * 8192 * 128_256 / 2 + hidden + buffers, 2 * 8192 * 128_256 / 2 + 3 * hidden]
    assert logits == pytest.approx(expected)


def test_context_parallel_ranks_store_keys_and_values_of_all_ranks_for_one_layer() -> None:
    model = replace(MODELS["llama2_70b"], ffn_hidden_size=64, vocab_size=8)  # attention is the larger part
    needed = [
        estimate(replace(make_config(model, Parallel(tp=1, pp=1, cp=cp)), precision=Precision.bf16), dp=1).workspace_gib
        for cp in (1, 2)
    ]
    gathered = 8192 * 4 * 2 * 1024
    assert (needed[1] - needed[0] / 2) * memory.GIB == pytest.approx(gathered)


@settings(max_examples=in_proportion(50))
@given(config=fused_configs(), dp=sizes, share=st.floats(-0.1, 1.1))
def test_fit_recomputes_no_more_than_needed(config: Config, dp: int, share: float) -> None:
    """Between the memory without recomputation and with qkv and fc1 of every layer recomputed."""
    world, most = world_of(config, dp=dp), config.model.num_layers // config.parallel.pp

    def needed(recomputed: Recomputed) -> float:
        return memory.estimate(config, world, recomputed).total_gib

    room = share * needed(NOTHING) + (1 - share) * needed(some(most, most))
    chosen = memory.recompute(with_memory(config, room), world)
    if chosen.full:
        assert needed(some(most, most)) > room and needed(some(most, 0)) > room and needed(NOTHING) > room
        return
    assert needed(chosen) <= room * (1 + 1e-12)
    if chosen.fc1_layers:
        assert chosen.qkv_layers == most and needed(some(most, chosen.fc1_layers - 1)) > room
    elif chosen.qkv_layers:
        assert needed(some(chosen.qkv_layers - 1, 0)) > room


@settings(max_examples=in_proportion(30))  # each makes an estimate for every layer
@given(config=fused_configs(), dp=sizes)
def test_recomputing_more_layers_never_stores_more(config: Config, dp: int) -> None:
    """Of one stage: with several, another may become the one that needs most."""
    config = replace(config, parallel=replace(config.parallel, pp=1, vpp=1))
    world, most = world_of(config, dp=dp), config.model.num_layers // config.parallel.pp
    choices = [*(some(n, 0) for n in range(most + 1)), *(some(most, n) for n in range(1, most + 1))]
    stored_gib = [memory.estimate(config, world, recomputed).activations_gib for recomputed in choices]
    assert all(less <= more * (1 + 1e-9) for more, less in pairwise(stored_gib))


@pytest.mark.long
@given(config=fused_configs(), dp=sizes, share=st.floats(-0.1, 1.1))
def test_fit_offloads_no_more_layers_than_needed(config: Config, dp: int, share: float) -> None:
    world, most = world_of(config, dp=dp), config.model.num_layers // config.parallel.pp

    def needed(num_offloaded: int) -> float:
        return memory.estimate(config, world, memory.offloaded(num_offloaded)).total_gib

    room = share * needed(0) + (1 - share) * needed(most)
    limited = with_memory(config, room)
    chosen = memory.recompute(replace(limited, recipe=replace(limited.recipe, offload_activations=True)), world)
    if chosen.full:
        assert needed(most) > room
        return
    assert (chosen.qkv_layers, chosen.fc1_layers) == (0, 0) and needed(chosen.offloaded_layers) <= room * (1 + 1e-12)
    assert not chosen.offloaded_layers or needed(chosen.offloaded_layers - 1) > room


def test_two_offloaded_layers_are_on_the_gpu() -> None:
    config = trained("llama2_7b", Precision.bf16, offload_activations=True)
    world, per_token = world_of(config, dp=1), 2 * (2 * 4096 + 3 * 4096 + 4096 + 2 * 11008) + 2 * 4 + 4 * 32
    assert memory.recompute(config, world) == memory.offloaded(32), "recompute=none: all of them"
    for num_offloaded, on_gpu in ((0, 32), (1, 32), (2, 32), (3, 31), (32, 2)):
        stored = memory.estimate(config, world, memory.offloaded(num_offloaded)).activations_gib * memory.GIB
        assert stored == pytest.approx(8192 * (on_gpu * per_token + 2 * 4096 * 2))


@pytest.mark.parametrize(("room", "full"), [(1.0, False), (0.999, True)])
def test_fit_in_megatrons_layers_is_all_or_nothing(room: float, full: bool) -> None:
    config = make_config(replace(MODELS["llama31_8b"], bias=True), Parallel(tp=1, pp=1, cp=1), lora=LORA, gpu=H200)
    needed = estimate(config, dp=8).total_gib
    chosen = memory.recompute(with_memory(config, room * needed), world_of(config, dp=8))
    assert chosen == replace(NOTHING, full=full)


def test_fit_without_a_gpu_recomputes_nothing() -> None:
    config = with_recompute(make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=LORA), Recompute.fit)
    assert memory.recompute(config, world_of(config, dp=1)) == NOTHING


def test_memory_is_not_checked_without_a_gpu() -> None:
    result = estimate(make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1)), dp=1)
    assert (result.capacity_gib, result.fits) == (None, None)
    assert result.workspace_gib * memory.GIB == pytest.approx(8192 * (4 * 2 * 28672 + 8 * 8192))
