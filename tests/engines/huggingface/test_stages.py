"""The calls of DeepSpeed at each ZeRO stage, in this process, with a fake DeepSpeed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bench.contract.plan import Plan
from bench.errors import ConfigError
from helpers import ranks
from helpers.huggingface_alone import tiny
from helpers.huggingface_runs import BLOCK, ZERO, needed

needed()

from jobs.engines.huggingface import engine as engines  # noqa: E402
from jobs.engines.huggingface import folders, weights  # noqa: E402
from jobs.engines.huggingface import model as models  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="nothing here differs on a GPU")

RANK, RANKS = 1, 2
NAME = "jobs.engines.huggingface.zero"
NODE = ("cluster.ranks_per_node=2", ZERO)


class DeepSpeedConfigError(Exception):
    """The same name as DeepSpeed's error."""


class Engine:
    """Counts micro-batches as a DeepSpeed engine does, and records calls."""

    def __init__(self, stage: int) -> None:
        self.stage, self.calls = stage, list[Any]()

    def zero_optimization_stage(self) -> int:
        return self.stage

    def backward(self, loss: Tensor) -> None:
        self.calls.append(("backward", float(loss)))

    def is_gradient_accumulation_boundary(self) -> bool:
        return [name for name, *_ in self.calls].count("backward") == 2

    def step(self) -> None:
        self.calls.append(("step",))


class DeepSpeed(ModuleType):
    """A fake module: `initialize` returns the optimizer wrapped by `wrapping`; it records arguments."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.__spec__ = ModuleSpec("deepspeed", loader=None)  # find_spec finds the fake module
        self.arguments: dict[str, Any] = {}
        self.stage, self.wrapping, self.refusal = 0, lambda optimizer: optimizer, None
        self.ops = SimpleNamespace(__compatible_ops__={"deepspeed_shm_comm": True})
        self.runtime = SimpleNamespace(config=SimpleNamespace(DeepSpeedConfigError=DeepSpeedConfigError))
        self.zero = SimpleNamespace(Init=self.sharding)

    def initialize(self, **arguments: Any) -> tuple[Engine, Any, None, None]:
        self.arguments |= arguments
        return Engine(self.stage), self.wrapping(arguments["optimizer"]), None, None

    def init_distributed(self, **arguments: Any) -> None:
        self.arguments |= arguments

    def sharding(self, *, config_dict_or_path: dict[str, Any]) -> Any:
        self.arguments |= {"sharding": config_dict_or_path}
        return nullcontext()

    def DeepSpeedConfig(self, content: dict[str, Any]) -> None:
        self.arguments |= {"checked": content}
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeepSpeed]:
    """Install the fake module, and import the engine's module anew with it."""
    built = DeepSpeed()
    adam = ModuleType("deepspeed.ops.adam")
    adam.DeepSpeedCPUAdam = lambda groups, **arguments: SimpleNamespace(  # type: ignore[attr-defined]
        param_groups=groups, arguments=arguments, state={p: {} for one in groups for p in one["params"]}
    )
    monkeypatch.setitem(sys.modules, "deepspeed", built)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", ModuleType("deepspeed.ops"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", adam)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: RANK)
    package, before = import_module("jobs.engines.huggingface"), sys.modules.pop(NAME, None)
    yield built
    del sys.modules[NAME], package.zero
    if before is not None:
        sys.modules[NAME], package.zero = before, before


def placed(plan: Plan) -> Any:
    zero = import_module(NAME)
    source = weights.RandomWeights(plan, 7, torch.device("cpu"))
    return zero.place(plan, zero.build(plan), source, torch.device("cpu"))


def test_stage_0_rank_updates_everything_and_saves_every_second_weight(deepspeed: DeepSpeed, tmp_path: Path) -> None:
    plan = tiny(tmp_path, "all", *NODE)
    own = placed(plan)
    names = [name for name, _ in own.model.named_parameters()]
    shards = own.shards()
    assert [(shard.name, shard.begin, shard.is_saved) for shard in shards] == [
        (name, 0, number % RANKS == RANK) for number, name in enumerate(names)
    ]
    embedding = own.model.get_parameter(names[0])
    assert shards[0].full_shape == tuple(embedding.shape) and torch.equal(
        shards[0].state["master"], embedding.flatten()
    )
    optimizer, r = deepspeed.arguments["optimizer"], plan.config.recipe
    assert [one["weight_decay"] for one in optimizer.param_groups] == [r.weight_decay, 0.0]
    assert {len(p.shape) for p in optimizer.param_groups[0]["params"]} == {2}
    assert (
        deepspeed.arguments["model"] is own.model
        and deepspeed.arguments["config"] == plan.deepspeed == deepspeed.arguments["checked"]
    )
    assert deepspeed.arguments["auto_mpi_discovery"] is False and "sharding" not in deepspeed.arguments
    assert deepspeed.ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
    assert {float(optimizer.state[p]["step"]) for one in optimizer.param_groups for p in one["params"]} == {0.0}
    optimizer.state[embedding]["exp_avg"].fill_(3)
    own.restart(4)
    assert optimizer.state[embedding]["step"] == 4 and own.shards()[0].state["exp_avg"].unique().tolist() == [3]
    own.restart()
    assert optimizer.state[embedding]["step"] == 0 and not own.shards()[0].state["exp_avg"].any()


def test_engine_builds_and_places_with_deepspeed(
    deepspeed: DeepSpeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines.process_group, "device", lambda: torch.device("cpu"))
    engine = engines.HuggingFaceEngine(tiny(tmp_path, "all", *NODE), 7)
    assert "checked" in deepspeed.arguments and "model" not in deepspeed.arguments, "it is placed when it is first used"
    assert engine.placement.module.calls == [] and deepspeed.arguments["model"] is engine.placement.model
    assert torch.initial_seed() == 7 + 1000 * RANK


def test_deepspeed_counts_micro_batches_and_updates_after_the_last(deepspeed: DeepSpeed, tmp_path: Path) -> None:
    own = placed(tiny(tmp_path, "all", *NODE))
    for number, is_last in ((1, False), (2, True)):
        with own.accumulating(is_last=is_last):
            own.pass_backward(torch.tensor(float(number)))
    assert own.module.calls == [("backward", 1.0), ("step",), ("backward", 2.0)]
    own.update(0.25)
    assert own.module.calls[3:] == [("step",)]
    assert [one["lr"] for one in deepspeed.arguments["optimizer"].param_groups] == [0.25, 0.25]


def test_master_weights_are_copies_of_bf16_weights(deepspeed: DeepSpeed, tmp_path: Path) -> None:
    def wrapped(optimizer: torch.optim.Optimizer) -> Any:
        low = [list(one["params"]) for one in optimizer.param_groups]
        for one in optimizer.param_groups:
            one["params"] = [Parameter(p.detach().float() + 1) for p in one["params"]]
        high = [one["params"] for one in optimizer.param_groups]
        return SimpleNamespace(optimizer=optimizer, fp16_groups=low, fp32_groups=high)

    deepspeed.wrapping = wrapped
    own = placed(tiny(tmp_path, "all", *NODE, "precision=bf16"))
    for shard, p in zip(own.shards(), own.model.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(shard.state["master"], p.detach().float().flatten() + 1), shard.name
        assert not shard.state["exp_avg"].any() and shard.state["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize(
    ("stage", "attribute"), [(1, "single_partition_of_fp32_groups"), (2, "fp32_groups_flat_partition")]
)
def test_stages_1_and_2_rank_updates_a_contiguous_part(
    stage: int, attribute: str, deepspeed: DeepSpeed, tmp_path: Path
) -> None:
    """Its part begins with the last elements of one weight; it does not update some weights."""
    flats = [torch.arange(40.0), 100 + torch.arange(8.0)]

    def wrapped(optimizer: torch.optim.Optimizer) -> Any:
        matrices, norms = (one["params"] for one in optimizer.param_groups)
        for p in (*matrices, *norms):
            p._hp_mapping = None
        for p, group, begin, at, numel in (
            (matrices[0], 0, 4066, 0, 30),
            (matrices[1], 0, 0, 30, 10),
            (norms[0], 1, 5, 2, 4),
        ):
            p._hp_mapping = SimpleNamespace(
                param_group_index=group,
                hp_fragment_address=SimpleNamespace(start=at, numel=numel),
                lp_fragment_address=SimpleNamespace(start=begin, numel=numel),
            )
        return SimpleNamespace(optimizer=optimizer, **{attribute: flats})

    deepspeed.stage, deepspeed.wrapping = stage, wrapped
    own = placed(tiny(tmp_path, "all", *NODE, f"{BLOCK}.zero_stage={stage}"))
    assert own.stage == stage
    shards = {shard.name: shard for shard in own.shards()}
    first, second, norm = "embed_tokens", "layers.0.self_attn.q_proj", "layers.0.input_layernorm"
    assert [(name, shard.full_shape, shard.begin, shard.is_saved) for name, shard in shards.items()] == [
        (f"model.{first}.weight", (128, 32), 4066, True),
        (f"model.{second}.weight", (32, 32), 0, True),
        (f"model.{norm}.weight", (32,), 5, True),
    ]
    masters = [shard.state["master"].tolist() for shard in shards.values()]
    assert masters == [list(range(30)), list(range(30, 40)), [102, 103, 104, 105]]
    own._base.state[flats[0]]["exp_avg_sq"].copy_(flats[0])
    assert shards[f"model.{second}.weight"].state["exp_avg_sq"].tolist() == masters[1]
    assert own._base.state.keys() >= set(flats)


def test_stage_3_rank_updates_an_equal_part_without_padding(deepspeed: DeepSpeed, tmp_path: Path) -> None:
    """The second of two parts of 33 of 64 elements has 31 elements and 2 of padding; one weight has none here."""
    plan = tiny(tmp_path, "all", *NODE, f"{BLOCK}.zero_stage=3")
    flats = [torch.arange(200.0), 1000 + torch.arange(50.0)]

    def wrapped(optimizer: torch.optim.Optimizer) -> Any:
        parameters = list(deepspeed.arguments["model"].parameters())
        places = {0: (0, 7, 33), 1: (1, 2, 40), 2: (0, 50, 20)}
        numbers = {id(p): number for number, p in enumerate(parameters)}
        places |= dict.fromkeys(range(3, len(parameters)), (0, 0, 0))
        sizes = {0: (33, 64), 1: (40, 80), 2: (20, 20)}
        for number, p in enumerate(parameters):
            part, whole = sizes.get(number, (1, 1))
            p.ds_tensor, p.ds_numel, p.ds_shape = torch.empty(part), whole, torch.Size((whole,))
        return SimpleNamespace(
            optimizer=optimizer,
            fp32_partitioned_groups_flat=flats,
            grad_position=places,
            get_param_id=lambda p: numbers[id(p)],
        )

    deepspeed.stage, deepspeed.wrapping = 3, wrapped
    own = placed(plan)
    assert deepspeed.arguments["sharding"] == plan.deepspeed
    shards = [(shard.full_shape, shard.begin, shard.state["master"].tolist(), shard.is_saved) for shard in own.shards()]
    assert shards == [((64,), 33, list(range(7, 38)), True), ((80,), 40, list(range(1002, 1042)), True)]
    own._base.state[flats[1]]["exp_avg"].copy_(flats[1])
    assert own.shards()[1].state["exp_avg"].tolist() == list(range(1002, 1042))


@pytest.mark.parametrize("is_pure", [False, True])
def test_offloaded_optimizer_is_deepspeed_s(is_pure: bool, deepspeed: DeepSpeed, tmp_path: Path) -> None:
    """With bf16=pure its moments in host memory are in BF16, too; DeepSpeed refuses others."""
    bf16 = ("precision=bf16", f"{BLOCK}.bf16=pure") if is_pure else ()
    zero, plan = (
        import_module(NAME),
        tiny(tmp_path, "all", *NODE, f"{BLOCK}.zero_stage=2", f"{BLOCK}.offload_optimizer=true", *bf16),
    )
    trained = [Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2))]
    built, r = zero._optimizer(plan, trained), plan.config.recipe
    rates = {"lr": r.lr, "betas": (r.adam_beta1, r.adam_beta2), "eps": r.adam_eps}
    assert built.arguments == rates | {"adamw_mode": True, "fp32_optimizer_states": not is_pure}
    assert built.param_groups == [
        {"params": trained[:1], "weight_decay": r.weight_decay},
        {"params": trained[1:], "weight_decay": 0.0},
    ]
    zero.optimizers.restart(built, trained, 3)
    assert [built.state[p]["step"] for p in trained] == [3, 3]


REFUSED = {
    "a list": (ValueError("first\n  second \nthird\nfourth"), "settings: first; second; third$"),
    "no message": (AssertionError(), r"settings: AssertionError\(\)"),
    "its own": (DeepSpeedConfigError("no such stage"), "settings: no such stage"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_deepspeed_rejects_are_refused_with_its_message(
    name: str, deepspeed: DeepSpeed, tmp_path: Path
) -> None:
    zero, plan = import_module(NAME), tiny(tmp_path, "all", *NODE)
    deepspeed.refusal, what = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        zero.build(plan)
    pytest.raises(ConfigError, zero.require, plan).match(f"(?m)rejects these {what}")
    assert "where: engine.huggingface\n" in str(caught.value) and "zero_stage or another setting of offload" in str(
        caught.value
    )
    block: Any = plan.config.engine.huggingface
    block.deepspeed_json = "mine.json"
    pytest.raises(ConfigError, zero.require, plan).match("where: mine.json\n  fix:   correct this file")


def test_a_plan_without_settings_for_deepspeed_is_refused(deepspeed: DeepSpeed, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the plan has no settings for DeepSpeed"):
        import_module(NAME).require(tiny(tmp_path, "all"))
    assert deepspeed.arguments == {}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_stage_3_recomputes_layers_with_inputs_that_require_gradients(
    deepspeed: DeepSpeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module(NAME)
    calls: list[Any] = []
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "enable_input_require_grads", lambda model: calls.append("inputs"))
    monkeypatch.setattr(
        LlamaForCausalLM, "gradient_checkpointing_enable", lambda model, **arguments: calls.append(arguments)
    )
    for stage in (3, 2):
        plan = tiny(tmp_path, "lora", *NODE, f"{BLOCK}.zero_stage={stage}", "recipe.recompute=full")
        models.build(plan)
    kind = "gradient_checkpointing_kwargs"
    assert calls == [{kind: {"use_reentrant": True}}, "inputs", {kind: {"use_reentrant": False}}]


def test_full_tensor_of_a_sharded_weight_is_a_copy(deepspeed: DeepSpeed) -> None:
    import_module(NAME)
    weight: Any = Parameter(torch.empty(0))
    weight.ds_tensor = torch.ones(2)

    @contextmanager
    def gathered(parameters: list[Parameter]) -> Iterator[None]:
        for p in parameters:
            p.data = torch.arange(4.0)
        yield
        for p in parameters:
            p.data.fill_(9)
            p.data = torch.empty(0)

    deepspeed.zero.GatheredParameters = gathered
    assert folders.full_tensor(weight).tolist() == [0, 1, 2, 3] and weight.numel() == 0
