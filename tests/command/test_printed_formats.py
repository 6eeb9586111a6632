"""Adapters of other programs: each reads its fixture, and no damage to the lines yields a wrong step or loss.

Fixtures that no program wrote say so in their first line. Those of DeepSpeed and accelerate were written on a CPU.
"""

import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.contract.program import Adapter, Program
from bench.errors import ConfigError
from bench.planning.compose import compose
from jobs.command.adapters import Reported, Unreadable, reader_of
from jobs.command.child import Lines

OUTPUTS = Path(__file__).with_name("outputs")
Values = tuple[int | None, float | None, float | None, float | None, float | None]
PATTERN = r"step (?P<step>\d+) loss (?P<loss>\d+\.\d{4})$"


def program(adapter: Adapter, name: str) -> Program:
    file = name if name.endswith("jsonl") else None
    return Program(argv=["x"], adapter=adapter, patterns=[PATTERN] if adapter is Adapter.plain else [], file=file)


def reported(settings: Program, raw: bytes) -> list[Reported]:
    reader, lines = reader_of(settings), Lines()
    read = []
    for line in (*lines.feed(raw), *lines.finish()):
        try:
            one = reader.read(line)
        except Unreadable:  # mllog and plain: the runner counts these
            continue
        read += [] if one is None else [one]
    return read


def values(read: list[Reported]) -> list[Values]:
    return [(one.step, one.loss, one.eval_loss, one.tokens, one.step_time_s) for one in read]


EXPECTED: dict[tuple[Adapter, str], list[Values]] = {
    (Adapter.megatron, "megatron_lm_0.20.0.out"): [
        (1, None, None, None, 0.901),  # its only iteration was skipped, which is no NaN
        *[(step, 10.5 - 0.45 * step, None, None, 0.9 + step / 1000) for step in range(2, 6)],
        (5, None, 8.4, None, None),
        *[(step, 10.5 - 0.45 * step, None, None, 0.9 + step / 1000) for step in range(6, 11)],
        (10, None, 6.2, None, None),  # and not the loss of the test set
    ],
    (Adapter.megatron, "megatron_bridge_0.7.0.out"): [
        *((5, 8.25, None, None, 1.25), (10, 6.0, None, None, 1.25), (10, None, 6.2, None, None)),
    ],
    (Adapter.nemo, "nemo_2.6.0rc0.out"): [
        *((1, 10.05, None, None, 0.51), (2, 9.6, None, None, 0.52), (3, 9.15, None, None, 0.53)),
        (3, None, 9.125, None, None),  # the line of step 4 is the first one with this evaluation
        *((5, 8.25, None, None, 0.55), (6, 7.8, None, None, 0.56)),
    ],
    (Adapter.torchtitan, "torchtitan_0.2.2.out"): [
        *((1, 10.05, None, None, None), (5, 8.25, None, None, None), (5, None, 8.35, None, None)),
        *((10, 6.0, None, None, None), (10, None, 6.1, None, None)),
    ],
    (Adapter.deepspeed, "deepspeed_0.19.8.out"): [(step, None, None, None, None) for step in (0, 2, 4, 6, 8)],
    (Adapter.deepspeed, "deepspeed_pipeline_0.19.8.out"): [(10, 8.5, None, None, 0.25), (20, 7.5, None, None, 0.25)],
    (Adapter.llama_factory, "llama_factory_0.9.6.dev0.jsonl"): [
        *((5, 8.25, None, 4096, None), (10, 6.0, None, 4096, None), (10, None, 6.1, None, None)),
        (12, None, None, 4096, None),
    ],
    (Adapter.maxtext, "maxtext_0.2.4.out"): [
        *((1, 10.05, None, 65536, 1.2), (2, 9.6, None, 65536, 1.3), (3, None, 9.55, None, None)),
        *((3, 9.15, None, 65536, 1.4), (4, 8.7, None, 65536, 1.5), (5, 8.25, None, 65536, None)),
    ],
    (Adapter.plain, "accelerate_1.15.0.out"): [
        (1 + place, loss, None, None, None)
        for place, loss in enumerate((1.0701, 1.1558, 1.0616, 0.5457, 0.6055, 0.6901, 0.6884, 0.3355))
    ],
}


@pytest.mark.parametrize(("adapter", "name"), EXPECTED, ids=lambda value: str(getattr(value, "name", value)))
def test_each_adapter_reads_its_program(adapter: Adapter, name: str) -> None:
    read = values(reported(program(adapter, name), (OUTPUTS / name).read_bytes()))
    assert rounded(read) == rounded(EXPECTED[adapter, name])


def rounded(rows: list[Values]) -> list[tuple[float | None, ...]]:
    return [tuple(None if value is None else round(value, 6) for value in row) for row in rows]


GARBAGE = st.one_of(
    st.text(max_size=60), st.sampled_from(["step: 7", "iteration 9/", "{'loss': 1", '{"current_steps": '])
)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.parametrize(("adapter", "name"), EXPECTED, ids=lambda value: str(getattr(value, "name", value)))
def test_damaged_lines_never_yield_a_wrong_step_or_loss(adapter: Adapter, name: str, data: st.DataObject) -> None:
    """Lines are cut, glued to the next one, mixed with garbage, and interrupted by a line of another process."""
    lines = (OUTPUTS / name).read_text().splitlines()
    intact = values(reported(program(adapter, name), "\n".join(lines).encode()))
    intact += [(4, 8.7, None, None, None)] if adapter is Adapter.nemo else []  # hidden by the evaluation in its line
    losses = {step: {one[1] for one in intact if one[0] == step} for step, *_ in intact}
    damaged: list[str] = []
    for line in lines:
        how = data.draw(st.sampled_from(["keep", "keep", "cut", "garbage", "other", "drop"]))
        place = data.draw(st.integers(0, len(line)))
        if how == "cut":
            damaged.append(f"{line[:place]}\n")
        elif how == "garbage":
            damaged.append(f"{data.draw(GARBAGE)}\n{line}\n")
        elif how == "other":  # two processes write at once
            damaged += [line[:place], f"{data.draw(st.sampled_from(lines))}\n", f"{line[place:]}\n"]
        elif how == "keep":
            damaged.append(f"{line}\n")
    for one in reported(program(adapter, name), "".join(damaged).encode("utf-8", "replace")):
        assert one.step in losses
        assert one.loss is None or one.loss in losses[one.step]


@given(st.text(max_size=200))
@example("iteration " + "9" * 5000 + "/" + "9" * 5000 + " | consumed samples: 1 |")
@example('{"current_steps": 1, "loss": ' + "9" * 400 + "}")
@example("{'loss': " + "9" * 400 + "}")
@example('{"current_steps": ' + "[" * 9000)
def test_no_text_ends_an_adapter(text: str) -> None:
    for adapter in Adapter:
        reported(program(adapter, "x"), text.encode("utf-8", "replace"))


@pytest.mark.parametrize(
    ("adapter", "line", "is_nan"),
    [
        (Adapter.megatron, "iteration 3/ 9 | consumed samples: 3 | number of skipped iterations: 0 |", False),
        (Adapter.torchtitan, "step:  3  loss:      nan  grad_norm:     nan  memory:  1.00GiB(1.00%)  tps: 1", True),
        (Adapter.torchtitan, "step:  3  loss: -1.00000  grad_norm:  1.0000  memory:  1.00GiB(1.00%)  tps: 1", False),
        (Adapter.deepspeed, "steps: 3 loss: nan iter time (s): 0.250 samples/sec: 64.000", True),
        (Adapter.nemo, "Training epoch 0, iteration 2/9 | reduced_train_loss: nan | consumed_samples: 3", True),
        (Adapter.maxtext, "completed step: 2, seconds: 1.000, total_weights: 8, loss: nan, lm_loss: nan", True),
        (Adapter.llama_factory, '{"current_steps": 3, "loss": NaN}', True),
    ],
)
def test_a_loss_that_is_not_a_number_is_passed_on_to_the_runner(adapter: Adapter, line: str, is_nan: bool) -> None:
    [read] = reported(program(adapter, "x"), line.encode())
    assert read.step == 3
    assert (read.loss is not None and math.isnan(read.loss)) is is_nan


def test_megatron_without_a_loss_has_a_loss_of_nan_unless_an_iteration_was_skipped() -> None:
    line = "iteration 3/ 9 | consumed samples: 3 | number of skipped iterations:   {} | number of nan iterations:   0 |"
    losses = [reported(program(Adapter.megatron, "x"), line.format(count).encode())[0].loss for count in (0, 1)]
    assert math.isnan(losses[0] or 0) and losses[1] is None


def test_megatron_on_several_nodes_is_refused_unless_its_last_rank_writes_a_file() -> None:
    words = ["task=my_program", "engine.command.adapter=megatron", "engine.command.argv=[train]", "cluster=slurm_test"]
    with pytest.raises(ConfigError, match="Megatron's last rank prints the lines"):
        compose(words)
    assert compose([*words, "engine.command.file='{output}/last.out'"]).config.program
    assert compose([*words, "cluster.num_nodes=1"]).config.program
