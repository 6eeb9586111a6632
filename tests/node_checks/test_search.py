"""The search for the slow node by real ranks that play four nodes, one of them delayed in its program."""

import json
from pathlib import Path

import pytest

from bench.contract import plan_kinds
from bench.contract.schema import Health
from helpers import ranks
from helpers.nodes import on_nodes

DELAYED = """
import os, time
from torch import distributed
from jobs.node_checks import health

exchange, reduce = distributed.batch_isend_irecv, distributed.all_reduce

def late(call):
    def delayed(*arguments, **options):
        if os.environ["SLURMD_NODENAME"] == "dgx-2":
            time.sleep(0.1)
        return call(*arguments, **options)
    return delayed

distributed.batch_isend_irecv, distributed.all_reduce = late(exchange), late(reduce)
health.main()
"""


@pytest.mark.trains
@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="four nodes on one machine")
def test_the_delayed_node_of_four_is_named_and_excluded(tmp_path: Path) -> None:
    planned = ranks.compose(tmp_path, "task=pretrain_tiny", "cluster.ranks_per_node=4", "recipe.global_batch_size=12")
    planned.config.cluster.health = Health(source="this test", min_mib=1, max_mib=1, busbw_gbs=1e6)
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    (tmp_path / "delayed.py").write_text(DELAYED)
    done = on_nodes(tmp_path, "delayed", "plan.json", size=(4, 1), OMP_NUM_THREADS="1")
    assert [code for code, _ in done] == [1, 1, 1, 1], done
    report = json.loads((tmp_path / "health.json").read_text())
    search = report["search"]
    assert search["decided"] and [(part["kind"], part["nodes"]) for part in search["parts"]] == [("nic", ["dgx-2"])]
    assert report["slow_nodes"] == search["excluded"] == ["dgx-2"]
    assert search["rounds"] <= 5 and search["others_busbw_gbs"] > report["allreduce"][0]["busbw_gbs"]
    assert "Slow, after" in done[0][1] and "exclude the node (--exclude=dgx-2)" in done[0][1]
