"""The measurements, the table and the picture of a profile that is written by hand."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench import report
from bench.console import sheet
from bench.contract.modules import ModuleTimes, Part, Phase, TimeRow
from bench.contract.modules import plain as plain_times
from bench.mlperf.result import Result, parse
from bench.report import figures, sets, training
from bench.results import names
from bench.results.modules import NAMES
from bench.results.training import TrainingResult
from helpers.types import MakeLog


def row(phase: Phase, part: Part, time_ms: float, gemm_ms: float = 0.0, busy_ms: float | None = None) -> TimeRow:
    busy_ms = time_ms if busy_ms is None else busy_ms
    return TimeRow(phase=phase, part=part, time_ms=time_ms, gemm_ms=gemm_ms, busy_ms=busy_ms, launches=2.0)


TIMES = ModuleTimes(
    device="cuda",
    num_steps=2,
    step_ms=200.0,
    is_eager=True,
    rows=[
        row(Phase.forward, Part.qkv, 20.0, 16.0),
        row(Phase.forward, Part.fc1, 15.0, 15.0),
        row(Phase.forward, Part.activation, 5.0),
        row(Phase.forward, Part.gap, 10.0, busy_ms=0.0),
        row(Phase.backward, Part.qkv, 40.0, 39.0),
        row(Phase.backward, Part.fc1, 30.0, 30.0),
        row(Phase.backward, Part.communication, 30.0, busy_ms=44.0),
        row(Phase.optimizer, Part.adamw, 49.0),
        row(Phase.optimizer, Part.copies, 0.0, busy_ms=12.0),
        row(Phase.other, Part.unnamed, 1.0),
    ],
)


def profiled(written_log: MakeLog, times: Any = TIMES) -> Result:
    return parse(written_log(module_times=plain_times(times) if isinstance(times, ModuleTimes) else times))


def test_a_profile_has_the_measurements_of_the_published_tables(written_log: MakeLog) -> None:
    """Phases, modules of both passes, the share of GEMMs, communication and copies, all and exposed."""
    result = profiled(written_log)
    assert result.module_times == TIMES
    measurements = {one.name: (one.value, one.unit, one.n) for one in TrainingResult(result=result).measurements}
    expected_ms = {
        "profiled_step_time": 200,
        "time_forward": 50,
        "time_backward": 100,
        "time_optimizer": 49,
        "compute_time_forward": 40,
        "compute_time_backward": 70,
        "compute_time_optimizer": 49,
        "time_qkv": 60,
        "time_forward_qkv": 20,
        "time_backward_qkv": 40,
        "time_mlp": 50,
        "time_backward_mlp": 30,
        "time_activation": 5,
        "time_gap": 10,
        "time_adamw": 49,
        "time_optimizer_adamw": 49,
        "time_unnamed": 1,
        "communication_total": 44,
        "communication_exposed": 30,
        "copies_total": 12,
        "copies_exposed": 0,
    }
    assert {name: measurements[name] for name in expected_ms} == {
        name: (ms, "ms", 2) for name, ms in expected_ms.items()
    }
    shares = {"gemm_share": 0.5, "gemm_share_forward": 0.62, "gemm_share_backward": 0.69, "gemm_share_optimizer": 0}
    shares |= {"communication_share": 0.22, "copies_share": 0.06}
    shares |= {"relative_time_backward": 0.5, "relative_time_backward_with_recomputation": 0.5}
    shares |= {"relative_time_forward_qkv": 0.4, "relative_time_backward_communication": 0.3}
    assert {name: measurements[name] for name in shares} == {name: (share, "", 2) for name, share in shares.items()}
    assert "time_head" not in measurements, "rank 0 has none"
    assert "time_recomputation" not in measurements and "attention_module_forward" not in measurements
    profile = {name for name in measurements if name.startswith(("time_forward", "time_qkv", "gemm", "profiled"))}
    assert profile <= set(NAMES) and {names.misspelt(name) for name in profile} == {None}


def test_recomputation_is_a_phase_and_part_of_the_published_backward_time(written_log: MakeLog) -> None:
    """Table VII of arXiv 2311.03687 has one time for both; the attention module is of one layer."""
    recomputed = (row(Phase.recomputation, Part.qkv, 20.0, 16.0), row(Phase.recomputation, Part.attention, 10.0))
    times = replace(TIMES, rows=[*TIMES.rows, *recomputed], step_ms=230.0, num_layers=4)
    result = profiled(written_log, times)
    assert result.module_times == times
    values = {one.name: one.value for one in TrainingResult(result=result).measurements}
    expected = {
        "time_backward": 100,
        "time_recomputation": 30,
        "time_backward_with_recomputation": 130,
        "compute_time_backward_with_recomputation": 100,
        "relative_time_backward_with_recomputation": 130 / 230,
        "gemm_share_backward_with_recomputation": 85 / 130,
        "time_recomputation_attention": 10,
        "attention_module_forward": 20 / 4,
        "attention_module_recomputation": 30 / 4,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert set(expected) <= set(NAMES)
    table = training.modules_table(result, times)
    assert table.columns[1:5] == ("forward (ms)", "backward (ms)", "recomputation (ms)", "optimizer (ms)")
    assert table.rows[-1][1:6] == ("50.000", "100.000", "30.000", "49.000", "230.000")


def test_a_log_without_a_profile_or_with_a_damaged_one_has_none_of_them(written_log: MakeLog) -> None:
    damaged = plain_times(TIMES) | {"rows": [{"phase": "sideways"}]}
    for number, changes in enumerate(({}, {"module_times": damaged}, {"module_times": "twelve"})):
        result = parse(written_log(name=f"{number}.txt", **changes))
        assert result.module_times is None
        assert not {one.name for one in TrainingResult(result=result).measurements} & set(NAMES)


def test_the_table_has_totals_and_notes_on_the_method(written_log: MakeLog) -> None:
    out = io.StringIO()
    sheet.show(training.modules_table(profiled(written_log), TIMES), file=out)
    _, head, *lines = out.getvalue().splitlines()
    cells = {line.split("\t")[0]: line.split("\t")[1:] for line in lines if "\t" in line}
    assert head.split("\t")[1:6] == ["forward (ms)", "backward (ms)", "optimizer (ms)", "all (ms)", "step (%)"]
    assert cells["QKV projection"] == ["20.000", "40.000", "", "60.000", "30.0", "55.000", "4"]
    assert cells["MLP: total"] == ["20.000", "30.000", "", "50.000", "25.0", "45.000", "6"]
    assert cells["the whole step"] == ["50.000", "100.000", "49.000", "200.000", "100.0", "100.000", "20"]
    names_of_parts = list(cells)
    assert names_of_parts.index("MLP: total") == names_of_parts.index("MLP: activation") + 1
    assert "ran without a CUDA graph" in out.getvalue() and "mean over 2 profiled" in out.getvalue()


@pytest.mark.long
def test_the_page_has_the_figure_and_the_table(written_log: MakeLog, tmp_path: Path) -> None:
    profiled(written_log)
    page = report.write(sets.load([tmp_path]), tmp_path / "out").read_text()
    _, _, section = page.partition("Step time breakdown</h3>")
    assert (tmp_path / "out" / "modules.png").stat().st_size > 10_000 and "modules.png" in section
    cells = re.findall("<td[^>]*>([^<]*)</td>", section.partition("</table>")[0])
    assert cells[-8:] == ["the whole step", "50.000", "100.000", "49.000", "200.000", "100.0", "100.000", "20"]
    assert "mean over 2 profiled warm-up steps" in section


def test_stacked_bars_end_at_the_time_of_their_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: saved.append(figure))
    figures.module_figure([("a", TIMES), ("b", TIMES)], tmp_path / "x.png", heading="h", note="n")
    (axes,) = saved[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["a forward", "a backward", "a optimizer"]
    ends = [0.0] * 6
    for bar in axes.patches:
        place = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(ends[place]), "each part begins where the one before ends"
        ends[place] += bar.get_width()
    assert ends == pytest.approx([50, 100, 49] * 2)
    assert [text.get_text() for text in saved[0].legends[0].get_texts()][-2:] == [
        "communication, not overlapped",
        "idle: waiting for the host",
    ]
