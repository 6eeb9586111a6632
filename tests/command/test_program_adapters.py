"""Adapters read what real programs print; the lines may arrive in any pieces, with anything between them."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract.program import Adapter, Program, filled
from jobs.command.adapters import Reported, Unreadable, reader_of
from jobs.command.child import MAX_LINE_BYTES, Kept, Lines

OUTPUTS = Path(__file__).with_name("outputs")


def reported(program: Program, raw: bytes) -> list[Reported]:
    """Return what the lines of an output say."""
    reader, lines = reader_of(program), Lines()
    return [one for line in (*lines.feed(raw), *lines.finish()) if (one := reader.read(line)) is not None]


def test_hf_trainer_reads_the_output_of_trl_with_its_progress_bars(tmp_path: Path) -> None:
    """Written by TRL 1.16.0's SFTTrainer on transformers 5.23.0, on a CPU; its middle is cut out."""
    program = Program(argv=["x"], adapter=Adapter.hf_trainer)
    read = reported(program, (OUTPUTS / "trl_1.16.0.out").read_bytes())
    assert [one.step for one in read] == [1, 2, 3, 4, 5, None]
    assert [one.loss for one in read[:2]] == [6.315, 5.762] and read[-1].total_time_s == 34.07
    state = tmp_path / "trainer_state.json"
    for steps, complaint in ((5, None), (7, "has 7 steps .* printed have 5 steps: set engine.command.every")):
        state.write_text(json.dumps({"global_step": steps, "logging_steps": 1}))
        reader = reader_of(Program(argv=["x"], adapter=Adapter.hf_trainer, file=str(state)))
        for line in (OUTPUTS / "trl_1.16.0.out").read_text().replace("\r", "\n").splitlines():
            reader.read(line)
        if complaint is None:
            assert reader.finished() is None
        else:
            with pytest.raises(Unreadable, match=complaint):
                reader.finished()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'loss': 1.25, 'grad_norm': nan, 'learning_rate': 0.1, 'epoch': 0.5}", Reported(step=5, loss=1.25)),
        ("{'eval_loss': '0.9', 'eval_runtime': '2.5', 'epoch': '1'}", Reported(eval_loss=0.9, eval_time_s=2.5)),
        ("{'loss': 1.25, 'grad_", None),
        ("{'other': 1}", None),
        ("no dict", None),
    ],
)
def test_hf_trainer_counts_steps_by_its_lines(line: str, expected: Reported | None) -> None:
    assert reader_of(Program(argv=["x"], adapter=Adapter.hf_trainer, every_steps=5)).read(line) == expected


def test_a_loss_that_is_not_a_number_is_passed_on() -> None:
    read = reported(Program(argv=["x"], adapter=Adapter.hf_trainer), b"{'loss': nan, 'epoch': 1}\n{'loss': 'inf'}\n")
    assert [math.isnan(read[0].loss or 0), read[1].loss] == [True, math.inf]
    plain = Program(argv=["x"], adapter=Adapter.plain, patterns=[r"(?P<step>\d+) (?P<loss>\S+)"])
    assert math.isnan(reported(plain, b"3 NaN\n")[0].loss or 0)
    with pytest.raises(Unreadable, match="the pattern's group loss matched 'oops'"):
        reported(plain, b"3 oops\n")


RECORD = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "seed", "value": 3, "metadata": {}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps(RECORD)[:40], "not valid JSON"),
        (json.dumps(RECORD | {"metadata": 3}), "must be an object"),
        (json.dumps(RECORD | {"event_type": "SOMETIMES"}), "event_type 'SOMETIMES'"),
        (json.dumps(RECORD | {"time_ms": "now"}), "must be a number"),
        ("[]", "not a JSON object"),
        (f"{json.dumps(RECORD)} :::MLLOG {json.dumps(RECORD)}", "two records"),
    ],
)
def test_mllog_refuses_damaged_records_and_reads_whole_ones_anywhere_in_a_line(text: str, reason: str) -> None:
    program = Program(argv=["x"])
    [read] = reported(program, f"0: noise :::MLLOG {json.dumps(RECORD)} more\ngrep ':::MLLOG'\n".encode())
    assert read.record is not None and (read.record.key, read.record.value) == ("seed", 3)
    with pytest.raises(Unreadable, match=reason):
        reported(program, f":::MLLOG {text}\n".encode())


@given(
    st.lists(st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")), max_size=8),
    st.integers(1, 7),
)
def test_lines_do_not_depend_on_how_the_output_arrives(lines: list[bytes], size: int) -> None:
    raw, split = b"\n".join(lines), Lines()
    pieces = (raw[start : start + size] for start in range(0, len(raw), size))
    read = [line for piece in pieces for line in split.feed(piece)] + list(split.finish())
    assert read == [line.decode(errors="replace") for line in lines if line]


@pytest.mark.long
def test_a_line_without_an_end_takes_bounded_memory(tmp_path: Path) -> None:
    split = Lines()
    read = [line for _ in range(40) for line in split.feed(b"x" * (MAX_LINE_BYTES // 8))]
    assert [len(line) for line in read] == [MAX_LINE_BYTES] and split.num_cut == 1
    assert list(split.feed(b"rest of it\nnext\n")) == ["next"]
    path = tmp_path / "kept"
    with path.open("wb") as file:
        kept = Kept(file.fileno(), most=100)
        for number in range(100_000):
            kept.write(b"%06d\n" % number)
        kept.finish()
    text = path.read_text()
    assert text.startswith("000000\n") and text.endswith("099999\n") and len(text) < 70_000
    assert f"{kept.num_dropped:,} bytes of output are not kept" in text and kept.num_bytes == 700_000


def test_only_known_braces_are_placeholders() -> None:
    values = {"seed": "7"}
    assert filled('{seed} {{seed}} {"a": 1} {Seed}', values) == '7 {seed} {"a": 1} {Seed}'
    with pytest.raises(KeyError):
        filled("{lr}", values)
