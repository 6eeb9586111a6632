"""Predicted times of collectives, steps and whole runs: golden_predictions.txt, so that a change shows all it changes.

After a change on purpose, run it once with WRITE_PREDICTIONS=1, and read the difference.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.planning import compose
from bench.prediction import grade, network, published, scale, search, step
from bench.prediction.scale import StackName
from bench.prediction.step import Layout
from helpers import golden, user_tables
from helpers.golden import significant

GOLDEN = Path(__file__).with_name("golden_predictions.txt")
COLLECTIVES = (network.all_gather_s, network.all_reduce_s, network.all_to_all_s, network.send_s)
GROUPS = ((2, 1), (8, 1), (4, 4), (8, 8), (64, 8), (512, 8), (512, 1), (72, 36))
"""Ranks of a group, and how many of them share an NVLink domain."""
LAYOUT = Layout(
    tp=1, pp=1, cp=1, dp=8, vpp=1, micro_batch_size=1, global_batch_size=64, seq_length=8192,
    balances_ends=False, recompute=False, graphs=False,
)  # fmt: skip
LAYOUTS = (
    LAYOUT,
    replace(LAYOUT, tp=4, dp=2, graphs=True),
    replace(LAYOUT, tp=2, pp=4, vpp=2, dp=8, recompute=True),
    replace(LAYOUT, pp=4, dp=4, balances_ends=True, micro_batch_size=2),
    replace(LAYOUT, cp=4, dp=16, seq_length=32768),
    replace(LAYOUT, tp=8, pp=2, cp=2, dp=4, graphs=True),
)
SCALED = (
    (("task=lora70b", "cluster=dgx8"), (1, 2, 8, 64)),
    (("task=llama31_8b", "cluster=dgx8"), (1, 8, 64)),
    (("task=pretrain_70b", "cluster=dgx8", "+failures@cluster.failures=meta"), (8, 64, 1024)),
    (("task=pretrain_7b", "cluster=dgxh200", "precision=fp8"), (1, 4, 32)),
    (("task=pretrain_7b", "cluster=dgx8", "precision=fp8", "model=mixtral_8x7b"), (4, 32)),
    (("task=pretrain_7b", "cluster=dgx8", "precision=fp8", "model=gpt_oss_20b"), (1, 8)),
)


def collectives() -> Iterator[str]:
    for gpu in published.PREDICTED_GPUS:
        own = network.links(published.network(gpu), 8, published.smaller_groups(gpu))
        for links in (own, replace(own, has_multicast=True, has_reduction=True)):
            for group, size in itertools.product(GROUPS, (1e4, 1e7, 1e10)):
                times = [significant(each(size, network.Group(*group), links)) for each in COLLECTIVES]
                yield f"{gpu} nvls={links.has_multicast} sharp={links.has_reduction} {group} {size:g} B: {times}"


def steps() -> Iterator[str]:
    for row in grade.graded():
        if row.terms is not None:
            yield f"{row.row.name}: {json.dumps(significant(row.terms))}"
    for name in ("vtrain_one_node", "vtrain_many_nodes", "selene"):
        for number, measured in enumerate(published.measured(name)[::40]):
            yield f"{name} {number}: {grade.error_on_a100(measured):.7g}"
    for gpu, benchmark in itertools.product(("h100", "h200", "gb200"), published.MODELS):
        work = grade.work(gpu, benchmark, gpus_per_node=8)
        for number, layout in enumerate(LAYOUTS):
            terms = json.dumps(significant(step.predict(work, layout)))
            yield f"{gpu} {benchmark}, layout {number}: {search.memory(work, layout):.7g} GiB, {terms}"


def runs() -> Iterator[str]:
    for (words, nodes), stack in itertools.product(SCALED, StackName):
        try:
            scaling = scale.predict(compose.unplanned(list(words)), nodes, stack=stack)
            predicted = json.dumps(significant(scaling), default=str)
        except ConfigError as error:
            predicted = f"refused: {error.what}"
        yield f"{' '.join(words)} by {stack}: {predicted}"


@pytest.mark.long
def test_predictions_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    text = "\n".join([*collectives(), *steps(), *runs(), ""])
    golden.require(text, GOLDEN, variable="WRITE_PREDICTIONS")
