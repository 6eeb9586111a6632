"""Units of engine=huggingface in this process: missing libraries, attention kernels, placement, offloading."""

import logging
import warnings
from collections import Counter
from importlib import util
from pathlib import Path

import pytest
import torch

from bench.errors import ConfigError
from bench.planning import compose
from helpers import ranks
from helpers.huggingface_runs import BLOCK, TRAINS, composed, needed

needed()

from jobs.engines.huggingface import end_ranks, groups, loop, offload, packages, placement, start_ranks, weights  # noqa: E402
from jobs.engines.huggingface import model as models  # noqa: E402
from jobs.engines.huggingface.loop import OperatorRecorder  # noqa: E402
from jobs.ranks.identity import Rank  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="nothing here differs on a GPU")

MISSING = {
    "accelerate": (TRAINS["all"], "engine=huggingface needs the library accelerate"),
    "peft": (TRAINS["lora"], "task.training.trains=lora needs the library peft"),
    "bitsandbytes": (
        (*TRAINS["lora"], "task.training.trains=qlora", "precision=bf16"),
        "task.training.trains=qlora needs the library bitsandbytes",
    ),
    "deepspeed": ((*TRAINS["all"], f"{BLOCK}.strategy=deepspeed"), "strategy=deepspeed needs the library deepspeed"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_library_is_refused_with_its_install_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, what = MISSING[name]
    plan = composed(tmp_path, *overrides)
    packages.require(plan)
    find_spec = util.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda module: None if module == name else find_spec(module))
    with pytest.raises(ConfigError, match=r"pip install 'runstop\[huggingface\]'") as caught:
        packages.require(plan)
    assert what in str(caught.value)


def test_missing_flash_attention_has_its_own_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = composed(tmp_path, *TRAINS["all"])
    plan.config.engine.huggingface.attention = packages.Attention.flash_attention_2
    monkeypatch.setattr(packages, "find_spec", lambda module: None if module == "flash_attn" else module)
    with pytest.raises(ConfigError, match="pip install flash-attn --no-build-isolation"):
        packages.require(plan)


def test_reported_attention_kernel_is_the_one_that_ran() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    names = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        observed = OperatorRecorder()
        with sdpa_kernel(backend), observed:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        names[backend] = observed.attention("sdpa")
    assert names == {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.MATH: "math"}
    assert OperatorRecorder().attention("eager") == "eager"


def test_flash_attn_is_recognised_by_its_operator() -> None:
    """flash-attn 2.7 and later register their kernels as custom operators of torch."""
    operation = torch.library.custom_op(
        "flash_attn::_flash_attn_forward", lambda q: q.clone(), mutates_args=(), schema="(Tensor q) -> Tensor"
    )
    observed = OperatorRecorder()
    with observed:
        operation(torch.zeros(2))
    assert observed.attention("eager") == "flash_attention_2"


@pytest.mark.long
@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_balanced_uses_exactly_the_gpus_of_the_plan(num_gpus: int, tmp_path: Path) -> None:
    """Layers are in order and evenly distributed, with no weight elsewhere; `meta` and the CPU replace the GPUs."""
    layers = ("model.num_layers=6", "cluster.ranks_per_node=1", "recipe.global_batch_size=4")
    model = models.build(composed(tmp_path, *TRAINS["lora"], *layers))
    devices = placement.device_map(model, [2**30] * num_gpus)
    at = [devices[f"model.layers.{layer}"] for layer in range(6)] if num_gpus > 1 else [devices[""]] * 6
    assert at == sorted(at) and set(devices.values()) == set(range(num_gpus))
    assert max(map(at.count, at)) <= 6 // num_gpus + 1
    places = {name: torch.device("cpu" if gpu else "meta") for name, gpu in devices.items()}
    models.allocate(model, places)
    for name, parameter in model.named_parameters():
        place = max((known for known in devices if name.startswith(known)), key=len)
        assert parameter.device == places[place], name


def test_balanced_refuses_too_little_memory_and_missing_gpus(tmp_path: Path) -> None:
    model = models.build(composed(tmp_path, *TRAINS["all"], "cluster.ranks_per_node=1"))
    with pytest.raises(ConfigError, match="do not fit into 2 GPUs"):
        placement.device_map(model, [2**16] * 2)
    with pytest.raises(ConfigError, match="puts the layers on 3 GPUs, but this process can use only 0 GPUs"):
        placement.free_bytes(3)


GPT = (
    *("model=gpt3_126m", "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("model.num_attention_heads=2", "model.num_query_groups=2", "model.vocab_size=1024", "model.max_seq_length=1024"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"activation_function": "gelu_new"}, 'activation_function is "gelu_new"'),
        ({"n_head": 4}, "n_head is 4, but gpt3_126m has 2"),
    ],
)
def test_gpt_2_with_other_settings_is_refused(wrong: dict[str, object], what: str, tmp_path: Path) -> None:
    """The shapes of its weights are those of the plan."""
    import transformers

    model = composed(tmp_path, *TRAINS["all"], *GPT).config.model
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_inner": 64, "vocab_size": 1024, "n_positions": 1024}
    sizes |= {"activation_function": "gelu", "bos_token_id": None, "eos_token_id": None}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    net.save_pretrained(tmp_path / "right")
    name = "transformer.h.0.attn.c_attn.weight"
    read = weights.HuggingFaceFolder(tmp_path / "right", model).read(name, (32, 96))
    torch.testing.assert_close(read, net.get_parameter(name).detach())
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | wrong))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=what):
        weights.HuggingFaceFolder(tmp_path / "other", model)


def test_stored_activations_are_copies() -> None:
    """Changing the original memory changes no gradient. Weights are not copied, so changing them does."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with offload.save_activations_on_cpu(model, min_bytes=0):
        hidden = model[0](x)
        loss = model[1](hidden).square().sum()
    saved = hidden.detach().clone()
    hidden.data.zero_()
    loss.backward()
    out_grad = 2 * (model[1](saved)).detach()
    torch.testing.assert_close(model[1].weight.grad, out_grad.T @ saved)
    with offload.save_activations_on_cpu(model, min_bytes=0):
        inputs = torch.randn(4, 8, requires_grad=True)
        loss = model[1](inputs).sum()
    with torch.no_grad():
        model[1].weight.data.fill_(3.0)  # unseen by autograd, which has kept no copy
    loss.backward()
    torch.testing.assert_close(inputs.grad, torch.full((4, 8), 24.0))


def test_gathered_weights_are_not_offloaded() -> None:
    """Between two uses a weight of ZeRO stage 3 is empty; each time it is gathered into other memory."""
    layer, gathered = torch.nn.Linear(8, 8), torch.ones(8, 8)
    layer.weight.data, layer.weight.ds_shape = torch.empty(0), (8, 8)
    layer.register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", gathered))
    inputs = torch.randn(4, 8, requires_grad=True)
    with offload.save_activations_on_cpu(layer, min_bytes=0):
        loss = layer(inputs).sum()
    gathered.fill_(3.0)  # unseen by autograd, which has kept no copy
    loss.backward()
    torch.testing.assert_close(inputs.grad, torch.full((4, 8), 24.0))


@pytest.mark.long
def test_ranks_with_offloaded_optimizer_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread, as in other ranks, DeepSpeed's CPU AdamW would be as slow as one core."""
    offloaded = (f"{BLOCK}.strategy=deepspeed", f"{BLOCK}.zero_stage=2", f"{BLOCK}.offload_optimizer=true")
    gpu = ("cluster.device=cuda", "gpu@cluster.gpu=h200", *TRAINS["all"])
    monkeypatch.setattr(groups.os, "cpu_count", lambda: 96)
    monkeypatch.setattr(groups.os, "sched_getaffinity", lambda _: range(96))
    assert groups.optimizer_threads(composed(tmp_path, *gpu, *offloaded)) == 48
    assert groups.optimizer_threads(composed(tmp_path, *gpu)) is None
    own = (*offloaded, "+cluster.environment.OMP_NUM_THREADS=7")
    assert groups.optimizer_threads(composed(tmp_path, *gpu, *own)) is None


RANK = Rank(rank=3, local_rank=1, world_size=4, master_addr="node-a", master_port=29500)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rank_joins_the_group_and_runs_one_collective(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate and DeepSpeed read the rank from the environment; a rank that only generates runs no collective."""
    offloaded = (f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.offload_parameters=true")
    gpu = ("cluster.device=cuda", "gpu@cluster.gpu=h200") if device == "cuda" else ()
    plan = composed(tmp_path, *TRAINS["all"], *offloaded, *gpu)
    environment = {"THERE": "1"}
    monkeypatch.setattr(groups.os, "environ", environment)
    monkeypatch.setattr(groups.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(groups.os, "sched_getaffinity", lambda _: range(3))
    joined: list[object] = []
    monkeypatch.setattr(groups.process_group, "join", lambda *words, **more: joined.append((words, more)))
    monkeypatch.setattr(groups.process_group, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: joined.append((x.device.type, tuple(x.shape))))
    monkeypatch.setattr(groups, "_reduce_library_logging", lambda: joined.append("quiet"))
    start_ranks(plan, RANK)
    assert joined == ["quiet", ((plan, RANK), {"also_on_cpu": True}), ("meta", (1,))]
    assert environment == {
        "THERE": "1",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
        "TOKENIZERS_PARALLELISM": "false",
        **({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {"OMP_NUM_THREADS": "3"}),
    }
    replicas = composed(tmp_path, *TRAINS["all"])
    joined.clear()
    start_ranks(replicas, RANK)
    assert joined[1] == ((replicas, RANK), {"also_on_cpu": False})
    joined.clear()
    monkeypatch.setattr(type(replicas), "replicas_reduce", False)
    start_ranks(replicas, RANK)
    assert len(joined) == 2
    monkeypatch.setattr(groups.process_group, "shut_down", lambda: joined.append("left"))
    end_ranks()
    assert joined[2:] == ["left"]


def test_libraries_log_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"DEEPSPEED_LOG_LEVEL": "debug"}
    monkeypatch.setattr(groups.os, "environ", environment)
    names = ("DeepSpeed", "deepspeed", "bitsandbytes", "accelerate", "transformers", "torch.distributed")
    before = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.resetwarnings()
        groups._reduce_library_logging()
        warnings.warn_explicit("soon gone", FutureWarning, "a.py", 1, module="transformers.modeling_utils")
        warnings.warn_explicit("barrier() is slow", UserWarning, "a.py", 1, module="elsewhere")
        with pytest.warns(UserWarning, match="ours"):
            warnings.warn_explicit("ours", UserWarning, "a.py", 1, module="jobs.tasks.train")
    assert environment == {"DEEPSPEED_LOG_LEVEL": "debug", "TRANSFORMERS_VERBOSITY": "error"}
    assert {logging.getLogger(name).level for name in names} == {logging.ERROR}
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def test_versions_are_those_of_installed_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("peft", "flash_attn"):
            raise packages.PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(packages, "version", version)
    names = ("torch", "transformers", "accelerate", "deepspeed", "bitsandbytes")
    assert packages.versions() == {name: f"{name} 1" for name in names}


@pytest.mark.long
def test_generation_in_4_bits_needs_bitsandbytes() -> None:
    words = ("task=generate_7b", "engine=huggingface", "cluster=dgxh200", "cluster.ranks_per_node=1")
    base = {"transformers": "engine=huggingface", "accelerate": "engine=huggingface"}
    in_4_bits = compose.compose([*words, "task.generation.nf4=true"])
    assert packages.needed(in_4_bits) == base | {"bitsandbytes": "task.generation.nf4=true"}
    assert packages.needed(compose.compose(words)) == base


def test_profile_has_every_part_of_a_layer(tmp_path: Path) -> None:
    llama = models.build(composed(tmp_path, *TRAINS["lora"], "cluster.ranks_per_node=1", "model.num_layers=1"))
    llama_parts = Counter(part.name for _, part in loop.parts_of(llama))
    assert llama_parts == {
        "embedding": 1,
        "rope": 1,
        "norm": 3,
        "attention": 1,
        "qkv": 3,
        "output": 1,
        "activation": 1,
        "fc1": 2,
        "fc2": 1,
        "adapters": 2 * 2 * 4,
        "head": 1,
        "residual": 1,
    }
    gpt = models.build(composed(tmp_path, *TRAINS["all"], *GPT))
    gpt_parts = {name: [] for name in ("output", "fc2", "embedding", "norm", "residual")}
    names = {module: name for name, module in gpt.named_modules()}
    for module, part in loop.parts_of(gpt):
        gpt_parts.setdefault(part.name, []).append(names[module].removeprefix("transformer."))
    assert gpt_parts["output"] == ["h.0.attn.c_proj"] and gpt_parts["fc2"] == ["h.0.mlp.c_proj"]
    assert gpt_parts["embedding"] == ["wte", "wpe"] and gpt_parts["norm"] == ["h.0.ln_1", "h.0.ln_2", "ln_f"]
    assert gpt_parts["residual"] == ["h.0"]
