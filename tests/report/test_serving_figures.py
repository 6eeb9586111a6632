"""The figures of serving tasks: latency distributions, throughput bars, and a rate sweep with its knee."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bench.report import serving as serving_report
from bench.report.serving import NamedResult
from bench.results import kind as trial_results
from bench.results.serving import ServingResult
from helpers import serving, serving_log

Curves = dict[str, tuple[list[float], list[float]]]
SWEEP = ("task.serving.arrivals=[poisson]", "task.serving.rates=[1,2,4]")
BURST = ("task.serving.arrivals=[burst]", "task.serving.rates=[]")


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Collect the figures by file name instead of saving them."""
    kept: dict[str, Figure] = {}
    monkeypatch.setattr(serving_report, "save", lambda figure, path: kept.update({path.stem: figure}))
    return kept


def measured(path: Path, latency_s: dict[str, list[float | None]], *words: str, **changed: Any) -> ServingResult:
    plan = serving.planned("task.serving.server.batches_tokens=false", *words)
    result = trial_results.read(serving_log.write(plan, path, latency_s, **changed)).of_kind
    assert isinstance(result, ServingResult)
    return result


def curves(figure: Figure, panel: int = 0) -> Curves:
    lines = figure.axes[panel].get_lines()
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def styles(figure: Figure, panel: int = 0) -> dict[str, tuple[Any, Any]]:
    return {str(one.get_label()): (one.get_color(), one.get_linestyle()) for one in figure.axes[panel].get_lines()}


def bars(figure: Figure) -> list[tuple[float, float]]:
    """Return the position and the length of each bar."""
    return [(one.get_y() + one.get_height() / 2, one.get_width()) for one in figure.axes[0].patches]  # type: ignore[attr-defined]


def texts(figure: Figure) -> list[str]:
    return [one.get_text() for one in figure.axes[0].texts]


def names(figure: Figure, panel: int = 0) -> tuple[str, str]:
    return figure.axes[panel].get_xlabel(), figure.axes[panel].get_ylabel()


def test_figures_of_a_burst(tmp_path: Path, saved_figures: dict[str, Figure]) -> None:
    """Of four requests one failed: the curve ends at 3/4. Three answers of 8 tokens in 16 s are 1.5 tokens/s."""
    result = measured(tmp_path / "a", {"burst": [4.0, None, 16.0, 8.0]}, *BURST)
    paths = serving_report.draw([NamedResult("first", result)], tmp_path, heading="h", note="n")
    assert [path.name for path in paths] == ["latency_cdf.png", "output_throughput.png"] and len(saved_figures) == 2
    cdf, output = saved_figures["latency_cdf"], saved_figures["output_throughput"]
    assert curves(cdf) == {"burst": ([0, 4, 8, 16], [0, 0.25, 0.5, 0.75]), "limit": ([30, 30], [0, 1])}
    assert [line.get_drawstyle() for line in cdf.axes[0].get_lines()] == ["steps-post", "default"]
    assert cdf.axes[0].get_ylim() == (0, 1.02) and cdf.axes[0].get_xlim()[0] == 0
    assert names(cdf) == ("seconds from arrival to the last token", "share of all requests")
    assert cdf.get_suptitle() == "latency: h" and output.get_suptitle() == "output: h"
    assert cdf.get_supxlabel() == output.get_supxlabel() == "n"
    assert bars(output) == [(0, pytest.approx(1.5))] and texts(output) == [" 1.5"]
    assert output.axes[0].get_xlim() == (0, pytest.approx(1.12 * 1.5))
    assert names(output)[0] == "output tokens per second, successful requests only"
    assert [size.tolist() for size in (cdf.get_size_inches(), output.get_size_inches())] == [[8, 4.2], [8, 1.84]]


def test_far_limit_is_not_drawn_and_empty_figures_are_skipped(tmp_path: Path, saved_figures: dict[str, Figure]) -> None:
    """A limit of 30 s is saved_figures for an answer of 15 s, and not for one of 14.9 s."""
    for name, slowest, labels in (("a", 15.0, ["burst", "limit"]), ("b", 14.9, ["burst"])):
        named = NamedResult("first", measured(tmp_path / name, {"burst": [1.0, slowest]}, *BURST))
        assert serving_report.cdf_figure([named], tmp_path / "latency_cdf.png", heading="h", note="n")
        assert list(curves(saved_figures["latency_cdf"])) == labels
    status = {"status": ["ok", "short"]}
    short = NamedResult("first", measured(tmp_path / "d", {"burst": [1.0, 2.0]}, *BURST, **status))
    serving_report.cdf_figure([short], tmp_path / "latency_cdf.png", heading="h", note="n")
    assert curves(saved_figures["latency_cdf"]) == {"burst": ([0, 1], [0, 0.5])}, "an answer that is too short is none"
    failed = NamedResult("none", measured(tmp_path / "c", {"burst": [None, None]}, *BURST))
    saved_figures.clear()
    assert serving_report.draw([failed], tmp_path, heading="h", note="n") == [] and saved_figures == {}


@pytest.mark.long
def test_figures_of_several_trials(tmp_path: Path, saved_figures: dict[str, Figure]) -> None:
    """8 tokens per request: 400 requests in 1 s are 3,200 tokens/s, in 32 s 100. Colours go by trial, then dashes."""
    results = [
        NamedResult(f"trial {n}", measured(tmp_path / str(n), {"burst": [seconds] * 400}, *BURST))
        for n, seconds in enumerate([1.0, 32.0, *[2.0] * 8])
    ]
    serving_report.draw(results, tmp_path, heading="h", note="n")
    cdf, output = saved_figures["latency_cdf"], saved_figures["output_throughput"]
    assert list(curves(cdf)) == [f"burst: trial {n}" for n in range(10)], "the first one's limit is far beyond"
    number = len(serving_report.COLORS)
    expected = [(serving_report.COLORS[n % number], "-" if n < number else "--") for n in range(10)]
    assert list(styles(cdf).values()) == expected and number < 10
    assert bars(output)[:3] == [(9, 3200), (8, 100), (7, 1600)] and texts(output)[:3] == [" 3,200", " 100", " 1,600"]
    axes = output.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["burst: trial 0", "burst: trial 1"]
    assert [to_hex(one.get_facecolor()) for one in axes.patches] == [color for color, _ in expected]
    assert output.get_size_inches().tolist() == [8, pytest.approx(1.5 + 0.34 * 10)]


def test_figure_of_a_rate_sweep(tmp_path: Path, saved_figures: dict[str, Figure]) -> None:
    """Two requests at 4/s: the second arrives after 0.25 s, takes 31.75 s and misses the limit of 30 s."""
    loads: dict[str, list[float | None]] = {
        "poisson 1/s": [1.0, 1.0],
        "poisson 2/s": [2.0, 7.5],
        "poisson 4/s": [4.0, 31.75],
    }
    result = measured(tmp_path / "a", loads, *SWEEP)
    (*_, path) = serving_report.draw([NamedResult("first", result)], tmp_path, heading="h", note="n")
    figure = saved_figures["rate_sweep"]
    assert path == tmp_path / "rate_sweep.png" and figure.get_suptitle() == "rates: h"
    left, right = (curves(figure, panel) for panel in (0, 1))
    assert left.pop("limit")[1] == [30, 30]
    knee = ([2, 2], [0, 1])
    assert left == {"p50": ([1, 2, 4], [1, 2, 4]), "p99": ([1, 2, 4], [1, 7.5, 31.75]), "knee": knee}
    line = ([0, 4], [0, 4])
    assert right == {"completed": ([1, 2, 4], [1, 0.25, 0.0625]), "knee": knee, "all arriving requests": line}
    assert [styles(figure)[name][1] for name in ("p50", "p99", "knee", "limit")] == ["-", "--", ":", ":"]
    assert names(figure) == ("requests arriving per second", "seconds to the last token")
    assert names(figure, 1)[1] == "requests completed per second"
    assert all((axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0) for axes in figure.axes)


def test_figure_of_two_sweeps_with_failed_loads(tmp_path: Path, saved_figures: dict[str, Figure]) -> None:
    """There is no knee if all rates meet the limits; a load without successful requests has no latency and rate 0."""
    loads: dict[str, list[float | None]] = {name: [1.0, 1.0] for name in ("poisson 1/s", "poisson 2/s", "poisson 4/s")}
    gone = loads | {"poisson 4/s": [None, None]}
    results = [measured(tmp_path / "a", loads, *SWEEP), measured(tmp_path / "b", gone, *SWEEP)]
    burst = measured(tmp_path / "c", {"burst": [1.0]}, *BURST)
    named = [NamedResult("first", results[0]), NamedResult("s" * 30, results[1]), NamedResult("burst", burst)]
    assert serving_report.sweep_figure(named, tmp_path / "rate_sweep.png", heading="h", note="n")
    figure, long = saved_figures["rate_sweep"], f"{'s' * 23}… "
    left, right = (curves(figure, panel) for panel in (0, 1))
    assert list(left)[:2] == ["first p50", "first p99"] and "limit" not in left
    assert left[f"{long}p99"] == ([1, 2], [1, 1]) and left["first p99"][0] == [1, 2, 4]
    assert right[f"{long}completed"] == ([1, 2, 4], [1, pytest.approx(2 / 1.5), 0])
    assert "all arriving requests" in right and len([one for one in right if one.startswith("_")]) == 1
    first, second = styles(figure)["first p50"][0], styles(figure)[f"{long}p50"][0]
    assert (first, second) == serving_report.COLORS[:2]
    assert not serving_report.sweep_figure([named[2]], tmp_path / "x.png", heading="h", note="n")
