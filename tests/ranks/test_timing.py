"""The memory of a GPU: what torch counts, and what CUDA graphs hold beside it."""

import gc

import pytest

from jobs.ranks import timing

GIB = 2**30


def segment(total_gib: float, allocated_gib: float, pool: tuple[int, int]) -> dict[str, object]:
    """As torch.cuda.memory_snapshot() describes it; the pool of all that is in no graph is (0, 0)."""
    return {
        "total_size": int(total_gib * GIB),
        "allocated_size": int(allocated_gib * GIB),
        "segment_pool_id": pool,
        "blocks": [],
    }


@pytest.mark.parametrize(("reserved_gib", "peak_gib"), [(14.75, 14.5), (14.25, 14.25)])
def test_what_a_graph_holds_counts_as_allocated(
    monkeypatch: pytest.MonkeyPatch, reserved_gib: float, peak_gib: float
) -> None:
    """13.5 GiB of tensors, and 1 GiB of a graph's memory without tensors; but never more than what is reserved."""
    segments = [segment(13.5, 13.0, (0, 0)), segment(0.75, 0.0, (0, 1)), segment(0.5, 0.25, (0, 1))]
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: segments)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda gpu: int(13.5 * GIB))
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda gpu: int(reserved_gib * GIB))
    assert timing.peaks_gib() == (peak_gib, reserved_gib)


def test_of_several_gpus_the_fullest_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.memory_snapshot", list)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda gpu: [3, 7, 90][gpu] * GIB)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda gpu: [9, 8, 95][gpu] * GIB)
    assert timing.peaks_gib(2) == (7, 9)


def test_what_exists_before_the_clock_is_left_out_of_collections() -> None:
    gc.unfreeze()
    timing.settle()
    assert gc.get_freeze_count() > 1000 and gc.isenabled()
    gc.unfreeze()
