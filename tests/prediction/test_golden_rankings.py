"""Rankings of settings and layouts, and their intervals: the files of rankings/, so that a change shows all it changes.

After a change on purpose, run it once with WRITE_RANKINGS=1, and read the difference.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.planning import compose
from bench.prediction import candidates, scale, search, uncertainty
from bench.prediction.scale import StackName
from helpers import golden, user_tables
from helpers.golden import significant

GOLDEN = Path(__file__).with_name("rankings")
CPU = ("cluster=local", "cluster.device=cpu")
RANKED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("task=lora70b", "cluster=dgxh200", "precision=fp8", "cluster.ranks_per_node=4"), ()),
    (
        ("task=lora70b", "cluster=dgx1", "precision=fp8", "parallel.vpp=2", "recipe.micro_batch_size=1"),
        ("parallel.vpp",),
    ),
    (("task=lora70b", "cluster=dgx1", "recipe.cuda_graph=true", "parallel.tp=8"), ("recipe.cuda_graph", "parallel.tp")),
    (("task=pretrain_7b", "cluster=dgx1", "recipe.recompute=full"), ("recipe.recompute",)),
    (("task=pretrain_7b", "cluster=dgx1", "cluster.gpu.memory_gib=8"), ()),
    (("task=pretrain_7b", "cluster=dgx1", "parallel.cp=3"), ("parallel.cp",)),
    (("task=lora_tiny", *CPU, "cluster.ranks_per_node=4"), ()),
    (("task=pretrain_tiny", *CPU, "model=tiny_moe", "cluster.ranks_per_node=2"), ()),
)
"""Overrides, and the keys whose values are kept."""
REFUSED: tuple[tuple[tuple[str, ...], tuple[int, ...], StackName], ...] = (
    (("task=lora70b", *CPU), (1,), StackName.runstop),
    (("task=serve_7b", "cluster=dgx1"), (1,), StackName.runstop),
    (("task=lora_7b", "cluster=dgx1", "engine=huggingface"), (1,), StackName.runstop),
    (("task=lora70b", "cluster=dgx1", "cluster.gpu.rates=null"), (1,), StackName.runstop),
    (("task=lora70b", "cluster=dgx1", "cluster.network_gbs=null"), (1, 2), StackName.runstop),
    (("task=pretrain_7b", "cluster=dgx1", "model=gpt_oss_20b"), (1,), StackName.runstop),
    (("task=lora70b", "cluster=dgx1", "precision=bf16"), (1,), StackName.reference),
    (("task=lora70b", "cluster=dgx1", "precision=fp8"), (1,), StackName.reference_fp4),
    (("task=lora_7b", "cluster=dgx1", "precision=fp8", "model=mixtral_8x7b"), (1,), StackName.reference),
    (("task=lora70b", "cluster=kubernetes_mi300x", "precision=fp8"), (1,), StackName.reference),
    (("task=lora70b", "cluster=dgx1", "precision=fp8", "parallel.tp=3"), (1,), StackName.reference),
    (("task=lora70b", "cluster=dgx1", "trials=0"), (1,), StackName.runstop),
)
LAYOUTS = (
    ("llama2_70b", (8, 8, 8, 8192), search.Fixed()),
    ("llama31_405b", (64, 4, 24, 8200), search.Fixed(cp=1)),
    ("llama31_405b", (72, 8, 36, 8192), search.Fixed(pp=9)),
    ("mixtral_8x7b", (8, 2, 8, 64), search.Fixed(tp=2, pp=1)),
)
"""Model, number of GPUs, largest tp, global batch size, tokens of a sequence, and sizes that a user has set."""


def settings() -> Iterator[str]:
    for words, fixed in RANKED:
        yield f"settings of {' '.join(words)}, keeping {', '.join(fixed)}"
        try:
            ranked = candidates.ranked(compose.as_planned(compose.unplanned(words)), fixed=fixed)
        except ConfigError as error:
            yield from (f"  {line}" for line in str(error).splitlines())
            continue
        yield f"  {len(ranked)} fit"
        for one in ranked if len(ranked) <= 30 else [*ranked[:25], *ranked[-5:]]:
            yield f"  {json.dumps(significant(one))}"


def errors() -> Iterator[str]:
    for step in uncertainty.own_steps():
        yield f"runstop's step: {json.dumps(significant(step))}"
    for waits in (False, True):
        yield f"interval, waits for the host={waits}: {significant(uncertainty.of_runstop(waits_for_host=waits))}"
    for lora, one_node in itertools.product((False, True), repeat=2):
        interval = uncertainty.of_reference(is_lora=lora, is_one_node=one_node)
        yield f"interval, lora={lora}, one node={one_node}: {significant(interval)}"


def refusals() -> Iterator[str]:
    for words, num_nodes, stack in REFUSED:
        yield f"{stack.value} on {num_nodes} nodes: {' '.join(words)}"
        try:
            predicted = scale.predict(compose.unplanned(words), num_nodes, stack=stack)
            yield f"  {json.dumps(significant(asdict(predicted)), default=str)}"
        except ConfigError as error:
            yield from (f"  {line}" for line in str(error).splitlines())


def splits() -> Iterator[str]:
    for model, (gpus, largest_tp, batch, seq_length), fixed in LAYOUTS:
        config = compose.unplanned(("task=pretrain_7b", "cluster=dgx1", "precision=fp8", f"model={model}"))
        work = scale.reference_work(config)
        sizes = {"num_gpus": gpus, "largest_tp": largest_tp, "global_batch_size": batch, "seq_length": seq_length}
        yield f"layouts of {model}, {sizes}, {fixed}"
        layouts = [*search.layouts(config.model, **sizes, fixed=fixed)]
        fitting = search.rank(work, layouts, memory_gib=250)
        yield f"  {len(layouts)}, of which {len(fitting)} fit"
        for one in layouts[:: max(1, len(layouts) // 25)]:
            shown = {name: value for name, value in asdict(one).items() if value not in (1, False)}
            yield f"  {shown}: {search.memory(work, one):.7g} GiB"
        yield from (f"  {place}: {json.dumps(significant(one))}" for place, one in enumerate(fitting[:3], start=1))


@pytest.mark.long
@pytest.mark.parametrize("part", [settings, errors, refusals, splits], ids=lambda part: part.__name__)
def test_rankings_are_the_golden_ones(part: Callable[[], Iterator[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    text = "\n".join([*part(), ""])
    golden.require(text, GOLDEN / f"{part.__name__}.txt", variable="WRITE_RANKINGS")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1", [1]),
        ("1,2,...,2", None),
        ("1,2,...,3", [1, 2, 3]),
        ("1,2,4,...,64", [1, 2, 4, 8, 16, 32, 64]),
        ("1,2,…,20", [1, 2, 4, 8, 16, 20]),
        ("2, 6, ..., 60", [2, 6, 18, 54, 60]),
        ("4,6,...,11", [4, 6, 8, 10, 11]),
        ("4,6,...,10", [4, 6, 8, 10]),
        ("3,4,...,6", [3, 4, 5, 6]),
        ("1,...,4", None),
        ("1,2,...", None),
        ("1,2,...,4,8", None),
        ("...,2,3", None),
        ("0,1", None),
        ("2,1", None),
        ("1,1", None),
        ("4,2,...,1", None),
        ("a", None),
        ("", None),
    ],
)
def test_dots_continue_a_list_of_numbers_of_nodes(text: str, numbers: list[int] | None) -> None:
    if numbers is not None:
        assert scale.numbers(text) == numbers
        return
    with pytest.raises(ConfigError) as refused:
        scale.numbers(text)
    assert str(refused.value) == (
        f"{text!r} is not an ascending list of numbers of nodes\n  where: plan --scale\n"
        "  fix:   write numbers with commas, such as 1,2,4,8 or 1,2,4,...,1024"
    )
