"""Memory for training the Llama 2 models: the printed table, and its numbers by hand."""

from pathlib import Path

import pytest

from bench import cli
from bench.contract.schema import Config, Precision
from bench.contract.training import MomentPrecision
from bench.planning import compose
from bench.planning.estimates import model_memory
from bench.planning.estimates.model_memory import WAYS, Way, counted, planned, states_gb

GOLDEN = Path(__file__).parent / "plan_memory.txt"


@pytest.mark.long
def test_the_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", "--memory"])
    assert (done.value.code, capsys.readouterr().out) == (0, GOLDEN.read_text())


def test_memory_accepts_no_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", "--memory", "task=lora70b"])
    assert done.value.code == 2 and "plan --memory takes no other arguments, because" in capsys.readouterr().err


def test_arithmetic_by_hand() -> None:
    """Llama-2-7B: 6.738 billion weights; 16 bytes each in FP32, of which 107.8 GB need three GPUs of 40, so four."""
    seven = counted(6_738_415_616, "FP32")
    assert (seven.weights_gb, seven.training_gb) == pytest.approx((26.954, 107.815), abs=1e-3)
    assert seven.num_gpus == {40: 4, 80: 2, 141: 1}
    assert counted(6_738_415_616, "INT8").training_gb == pytest.approx(26.954, abs=1e-3)


def test_the_arithmetic_gives_all_published_numbers_of_gpus() -> None:
    sizes = {"llama2_7b": 6_738_415_616, "llama2_13b": 13_015_864_320, "llama2_70b": 68_976_648_192}
    for (model, precision), published in model_memory.PUBLISHED.items():
        ours = counted(sizes[model], precision)
        assert ours.num_gpus[40] == published.num_gpus
        assert ours.weights_gb == pytest.approx(published.weights_gb, rel=0.05)
        assert 1.05 < ours.training_gb / published.training_gb < 1.15


@pytest.fixture(scope="module")
def seven_b() -> Config:
    return compose.unplanned(["task=pretrain_7b", "cluster=dgxh200"])


def test_the_engines_states_by_bytes_per_weight(seven_b: Config) -> None:
    """FP32 4 + 4 + 4 + 8, BF16 2 + 4 + 4 + 8, with BF16 moments 14; FP8 adds a byte for each linear weight."""
    count, linears = 6.738415616, 32 * (4 * 4096**2 + 3 * 4096 * 11008) / 1e9
    by_hand = {Precision.fp32: 20 * count, Precision.bf16: 18 * count, Precision.fp8: 18 * count + linears}
    states = {precision: states_gb(seven_b, Way(name="", precision=precision)) for precision in by_hand}
    assert states == pytest.approx(by_hand)
    small = Way(name="", precision=Precision.bf16, moments=MomentPrecision.bf16)
    assert states_gb(seven_b, small) == pytest.approx(14 * count)


def test_more_memory_never_takes_more_gpus(seven_b: Config) -> None:
    for way in WAYS:
        gpus = [count for count in planned(seven_b, way).num_gpus.values() if count]
        assert gpus == sorted(gpus, reverse=True)
