"""Facts of a node by one process: what it collects, which paths it looks for, and the probe that it writes."""

import errno
import json
import os
import platform
import resource
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.contract import node_facts, plan_kinds
from bench.contract.node_facts import FileTime, NeededPath
from bench.contract.schema import DataSource, Runtime
from helpers import alone, ranks
from jobs.node_checks import facts, hardware
from jobs.ranks.identity import Rank

ALONE = ("task=pretrain_tiny", "cluster.ranks_per_node=1")


def test_a_rank_collects_its_facts_into_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the environment the names only; local rank 0 describes its node's hardware besides."""
    created = ranks.compose(tmp_path, *ALONE)
    created.environment.update(OMP_NUM_THREADS="7", PLANNED="as planned", OTHER="planned")
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(created))
    env = {"NCCL_DEBUG": "secret", "PLANNED": "as planned", "OTHER": "another", "HOME": "/root"}
    with alone.started(monkeypatch, tmp_path / "plan.json"):
        monkeypatch.setattr(os, "environ", env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "3"})
        monkeypatch.setattr(facts, "from_environment", lambda: Rank(0, 0, 1, "", 0))
        monkeypatch.setattr(facts, "machine", lambda plan, folder: None)
        monkeypatch.setattr(time, "time_ns", lambda: 1_780_000_999)
        monkeypatch.setattr(resource, "getrlimit", lambda what: (what == resource.RLIMIT_MEMLOCK, 99))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 8})
        facts.main()
    (path,) = (tmp_path / "facts").iterdir()
    actual = json.loads(path.read_text())
    assert path.name == "rank_0000.json" and (actual["rank"], actual["local_rank"], actual["world_size"]) == (0, 0, 1)
    assert actual["environment"] == ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "OMP_NUM_THREADS"]
    planned = created.environment.keys() - {"PLANNED"}
    assert set(actual["not_as_planned"]) == planned and actual["not_as_planned"] == sorted(planned)
    assert (actual["time_ms"], actual["memlock_bytes"], actual["num_cpus"]) == (1780, True, 3)
    assert (actual["cuda_visible_devices"], actual["attempt"], actual["machine"]) == ("3", None, None)
    assert actual["software"]["packages"]["torch"] == torch.__version__ and "apex" not in actual["software"]["packages"]
    assert actual["software"]["python"] == platform.python_version()


def test_only_the_first_rank_of_a_node_describes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(facts, "machine", lambda plan, folder: given.append(folder))
    monkeypatch.setattr(facts, "software", lambda: None)
    created = ranks.compose(tmp_path, *ALONE)
    assert facts.collect(created, Rank(5, 1, 8, "", 0), tmp_path).rank == 5 and given == []
    facts.collect(created, Rank(4, 0, 8, "", 0), tmp_path)
    assert given == [tmp_path]


def test_existence_of_the_paths_of_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "machine", lambda **given: given)
    missing, actual = str(tmp_path / "missing"), str(tmp_path)
    listed = [("a", actual, True), ("b", missing, False), ("c", None, True)]
    monkeypatch.setattr(facts, "paths", lambda plan: listed)
    given: Any = facts.machine(ranks.compose(tmp_path, *ALONE), tmp_path)
    expected = [NeededPath(*one, exists=one[0] == "a") for one in listed]
    assert list(given["paths"]) == expected and given["results"].path == actual


def test_a_probe_is_written_timed_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A whole MiB, since a full quota accepts an empty file; the error and the free space are returned."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(facts.shutil, "disk_usage", lambda folder: usage(9 * 2**30, 2**30, 5 * 2**20 + 7))
    moments, written = iter((10_000_000, 30_000_000)), []
    monkeypatch.setattr(time, "time_ns", lambda: next(moments))

    def fsync(file: int) -> None:
        written.append(os.fstat(file).st_size)
        os.utime(file, ns=(0, 20_999_999))

    monkeypatch.setattr(os, "fsync", fsync)
    actual = facts.results(tmp_path)
    assert actual == node_facts.Results(str(tmp_path), 5, None, FileTime(10, 20, 30))
    assert written == [2**20] and list(tmp_path.iterdir()) == []

    def full(file: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    actual = facts.results(tmp_path)
    assert (actual.refused, actual.clock, list(tmp_path.iterdir())) == ("Disk quota exceeded", None, [])
    assert facts.results(tmp_path / "missing").refused == "No such file or directory"


def test_paths_that_a_plan_reads_and_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SITE", "/site")
    created = ranks.compose(tmp_path, *ALONE)
    created = replace(created, base=None, base_dir=None, data_dir="$SITE/rows")
    cluster, container = created.config.cluster, created.config.container
    cluster.paths.data, cluster.paths.model, cluster.paths.logs = "$SITE/data", None, "/logs"
    roots = [("DATADIR", "/site/data", False), ("LOGDIR", "/logs", False)]
    container.mounts[:] = ["/a:/b:ro", "/c", "umount:/d", "$SITE/e:"]
    assert facts.paths(created) == roots
    created.config.data.source, container.runtime = DataSource.prepared, Runtime.pyxis
    assert facts.paths(created) == [
        *(*roots, ("the prepared rows", "/site/rows/train_tokens.npy", True)),
        *(("a mount", path, True) for path in ("/b", "/c", "/site/e")),
    ]
    container.runtime = Runtime.none
    monkeypatch.setattr(facts.checkpoint, "first_file", lambda folder, config: folder / "first")
    whole = replace(created, base_dir="$SITE/base")
    assert ("the checkpoint", "/site/base/first", True) in facts.paths(whole)
    assert all(what != "the checkpoint" for what, *_ in facts.paths(replace(whole, base=created)))
