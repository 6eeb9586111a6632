"""Parameter counts against published ones; memory estimates against arithmetic that can be done by hand."""

from dataclasses import asdict, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench import memory
from bench.schema import (
    Activation,
    Cluster,
    Config,
    Container,
    Data,
    DataSource,
    Device,
    Gpu,
    Launch,
    Lora,
    Model,
    Norm,
    Parallel,
    Paths,
    Position,
    Precision,
    Recipe,
    Recompute,
    Runtime,
    Scheduler,
    Task,
)

CONF = Path(__file__).parents[1] / "conf"
LORA = Lora(rank=16, alpha=32, dropout=0.1, target_modules=["linear_qkv", "linear_proj"])
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
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
    return Gpu(**yaml.safe_load((CONF / "cluster" / f"{cluster}.yaml").read_text())["cluster"]["gpu"])


MODELS = {name: load_model(name) for name in PARAMETERS}


def make_config(
    model: Model, parallel: Parallel, *, lora: Lora | None = None, gpu: Gpu | None = None, global_batch_size: int = 8
) -> Config:
    """Return a BF16 run on rows of 8192 tokens, micro-batches of one row."""
    return Config(
        task=Task(name="t", summary="t", benchmark=None, target_eval_loss=None, submittable=False, lora=lora),
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
            max_steps=10,
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
        cluster=Cluster(
            name="c",
            summary="c",
            org="o",
            platform="p",
            status="onprem",
            scheduler=Scheduler.local,
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
    gpu = draw(st.none() | st.just(load_gpu("dgx1")))
    batch = draw(st.sampled_from([8, 16, 64]))
    config = make_config(draw(models()), parallel, lora=draw(loras), gpu=gpu, global_batch_size=batch)
    return replace(config, precision=draw(st.sampled_from(Precision)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_shipped_models(name: str) -> None:
    assert memory.parameters(MODELS[name]) == PARAMETERS[name]
    assert MODELS[name].name == name


@pytest.mark.parametrize("name", ["gpt3_126m", "gpt3_5b"])
def test_gpt_parameters_by_the_papers_formula(name: str) -> None:
    """Narayanan et al. 2021: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), which leaves out the final norm."""
    model = MODELS[name]
    num_layers, hidden = model.num_layers, model.hidden_size
    formula = 12 * num_layers * hidden**2 + 13 * num_layers * hidden
    formula += (model.vocab_size + model.max_seq_length) * hidden
    assert memory.parameters(model) == formula + 2 * hidden


def test_lora_parameters_of_70b() -> None:
    assert memory.lora_parameters(MODELS["llama2_70b"], LORA) == 44_564_480


@given(model=models(), lora=loras, tp=sizes, pp=sizes)
def test_ranks_hold_the_model_and_their_replicas(model: Model, lora: Lora | None, tp: int, pp: int) -> None:
    stages = [memory.rank_parameters(model, lora, tp=tp, pp=pp, pp_rank=k) for k in range(pp)]
    hidden, num_layers = model.hidden_size, model.num_layers
    norm = hidden * (2 if model.norm is Norm.LayerNorm else 1)
    replicated = (2 * num_layers + 1) * norm
    replicated += 2 * num_layers * hidden if model.bias else 0
    replicated += model.max_seq_length * hidden if model.position is Position.learned else 0
    copy = model.vocab_size * hidden if model.tied_embeddings and pp > 1 else 0
    assert tp * sum(base for base, _ in stages) == memory.parameters(model) + (tp - 1) * replicated + copy
    if lora:
        whole = num_layers * len(lora.target_modules) * lora.rank * hidden  # qkv's and fc1's A, proj's and fc2's B
        total = memory.lora_parameters(model, lora)
        assert tp * sum(adapters for _, adapters in stages) == total + (tp - 1) * whole
    else:
        assert all(adapters == 0 for _, adapters in stages)


@given(config=configs(), dp=sizes)
def test_total_is_the_sum_of_its_parts(config: Config, dp: int) -> None:
    result = memory.estimate(config, dp=dp)
    parts = {key: value for key, value in asdict(result).items() if key.endswith("_gib") and key != "capacity_gib"}
    total = parts.pop("total_gib")
    assert total == pytest.approx(sum(parts.values()))
    assert all(value >= 0 for value in parts.values())
    assert result.fits is (None if config.cluster.gpu is None else total <= config.cluster.gpu.memory_gib)
    if config.task.lora is None:
        assert result.trainable_parameters == result.parameters == memory.parameters(config.model)
        assert result.adapter_weights_gib == 0
    else:
        assert result.trainable_parameters == memory.lora_parameters(config.model, config.task.lora)


@given(config=configs(), dp=sizes)
def test_full_recompute_never_keeps_more(config: Config, dp: int) -> None:
    full = memory.estimate(with_recompute(config, Recompute.full), dp=dp)
    none = memory.estimate(with_recompute(config, Recompute.none), dp=dp)
    assert full.activations_gib <= none.activations_gib * (1 + 1e-9)


@given(config=configs(), dp=sizes)
def test_distributed_optimizer_never_needs_more(config: Config, dp: int) -> None:
    whole, shard = (
        memory.estimate(replace(config, parallel=replace(config.parallel, distributed_optimizer=on)), dp=dp)
        for on in (False, True)
    )
    assert shard.optimizer_gib <= whole.optimizer_gib * (1 + 1e-9)
    assert shard.total_gib <= whole.total_gib * (1 + 1e-9)


@given(config=configs(), dp=sizes)
def test_sequence_parallel_never_needs_more(config: Config, dp: int) -> None:
    off, on = (
        memory.estimate(replace(config, parallel=replace(config.parallel, sp=sp)), dp=dp).total_gib
        for sp in (False, True)
    )
    assert on <= off * (1 + 1e-9)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "lora"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_more_tp_never_holds_more(name: str, lora: Lora | None, pp: int) -> None:
    held = [
        memory.estimate(make_config(MODELS[name], Parallel(tp=tp, pp=pp, cp=1), lora=lora), dp=1) for tp in (1, 2, 4)
    ]
    for few, many in pairwise(held):
        assert many.base_weights_gib <= few.base_weights_gib
        assert many.adapter_weights_gib <= few.adapter_weights_gib
        assert many.total_gib <= few.total_gib


def test_activations_of_a_gpt_layer_are_korthikantis_without_dropout_masks() -> None:
    """34 s b h less 2 s b h of masks; flash attention adds 4 bytes of softmax statistics per head and token."""
    model = MODELS["gpt3_5b"]
    result = memory.estimate(make_config(model, Parallel(tp=1, pp=1, cp=1)), dp=8)
    per_token = 32 * model.hidden_size + 4 * model.num_attention_heads
    assert result.activations_gib * memory.GIB == pytest.approx(8192 * model.num_layers * per_token)


def test_activations_of_a_lora_layer_by_hand() -> None:
    """Per token of Llama-2-70B: 2 norm inputs, qkv 10240, attention output, gate and up, 64 heads, 2 adapters."""
    config = make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=LORA)
    per_token = 2 * (2 * 8192 + 10240 + 8192 + 57344) + 4 * 64 + 2 * (3 * 8192 + 2 * 16)
    assert memory.estimate(config, dp=8).activations_gib * memory.GIB == pytest.approx(8192 * 80 * per_token)
    recomputed = memory.estimate(with_recompute(config, Recompute.full), dp=8).activations_gib * memory.GIB
    assert recomputed == pytest.approx(8192 * (79 * 2 * 8192 + per_token))


def test_lora_without_dropout_keeps_the_inputs_themselves() -> None:
    lora = replace(LORA, dropout=0.0)
    kept = [
        memory.estimate(make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=lora), dp=8).activations_gib
        for lora in (lora, LORA)
    ]
    assert (kept[1] - kept[0]) * memory.GIB == pytest.approx(8192 * 80 * (8192 + 3 * 8192))


@pytest.mark.parametrize(
    ("pp", "vpp", "num_microbatches", "expected"),
    [
        (1, 1, 8, 1.0),
        (4, 1, 8, 1.0),
        (4, 1, 2, 2 / 4),  # fewer micro-batches than stages
        (4, 2, 8, 1 + 3 / 8),
        (4, 4, 8, 1 + 3 / 16),
        (2, 2, 2, 1.0),  # every chunk of every micro-batch is in flight
    ],
)
def test_pipeline_depth_on_the_first_stage(pp: int, vpp: int, num_microbatches: int, expected: float) -> None:
    """In units of one micro-batch's activations in the whole model."""
    model = replace(MODELS["llama2_7b"], vocab_size=32)  # a small head leaves the first stage the fullest
    flat = memory.estimate(make_config(model, Parallel(tp=1, pp=1, cp=1), global_batch_size=1), dp=1)
    split = make_config(model, Parallel(tp=1, pp=pp, cp=1, vpp=vpp), global_batch_size=num_microbatches)
    assert memory.estimate(split, dp=1).activations_gib / flat.activations_gib == pytest.approx(expected)


def test_optimizer_and_gradients_of_full_training() -> None:
    config = make_config(MODELS["llama31_8b"], Parallel(tp=1, pp=1, cp=2))
    count = PARAMETERS["llama31_8b"]
    bf16 = memory.estimate(config, dp=4)
    assert bf16.base_weights_gib * memory.GIB == pytest.approx(2 * count)
    assert bf16.gradients_gib * memory.GIB == pytest.approx(4 * count)
    assert bf16.optimizer_gib * memory.GIB == pytest.approx(12 * count / 8)
    fp32 = memory.estimate(replace(config, precision=Precision.fp32), dp=4)
    assert fp32.base_weights_gib * memory.GIB == pytest.approx(4 * count)
    assert fp32.optimizer_gib * memory.GIB == pytest.approx(8 * count / 8)


def test_70b_lora_fits_80_gb_when_split_and_recomputed() -> None:
    parallel = Parallel(tp=4, pp=1, cp=2, sp=True)
    config = make_config(MODELS["llama2_70b"], parallel, lora=LORA, gpu=load_gpu("dgx1"))
    result = memory.estimate(with_recompute(config, Recompute.full), dp=1)
    assert result.fits is True
    assert result.base_weights_gib == pytest.approx(128.5 / 4, abs=0.1)
    assert result.capacity_gib == 79.6


def test_70b_does_not_fit_one_80_gb_gpu() -> None:
    config = make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1), lora=LORA, gpu=load_gpu("dgx1"))
    result = memory.estimate(with_recompute(config, Recompute.full), dp=8)
    assert result.fits is False
    assert result.base_weights_gib == pytest.approx(128.5, abs=0.1)


@pytest.mark.parametrize(
    ("tp", "cp", "recompute", "fits"),
    [(2, 1, Recompute.full, True), (2, 2, Recompute.none, False), (1, 2, Recompute.none, False)],
)
def test_70b_lora_bf16_on_h200(tp: int, cp: int, recompute: Recompute, fits: bool) -> None:
    """BF16 weights are 128.5 GiB: two GPUs hold them with room for activations, one does not."""
    parallel = Parallel(tp=tp, pp=1, cp=cp, sp=tp > 1)
    config = make_config(MODELS["llama2_70b"], parallel, lora=LORA, gpu=load_gpu("dgxh200"))
    assert memory.estimate(with_recompute(config, recompute), dp=2).fits is fits


def test_no_verdict_without_a_gpu() -> None:
    result = memory.estimate(make_config(MODELS["llama2_70b"], Parallel(tp=1, pp=1, cp=1)), dp=1)
    assert (result.capacity_gib, result.fits) == (None, None)
    assert result.workspace_gib * memory.GIB == pytest.approx(8192 * 32000 * 10)
