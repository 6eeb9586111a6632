"""conf/published: printed figures are compared with the documents, corrected ones with manual calculations."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from bench.errors import ConfigError
from bench.results import published
from bench.results.published import Figure, PublishedTable
from helpers.paths import ROOT

PUBLISHED = ROOT / "conf" / "published"
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.yaml"))
DOCUMENTS = ROOT.parent / "shared" / "seeds"
PLATFORMS = ("a800", "rtx4090", "rtx3090_nvlink", "rtx3090")
"""The columns of tables III, IV and IX: one file each, since each was measured on other hardware."""
WIDE = {3: "III", 4: "IV", 9: "IX"}
ANCHORS = {
    "ironbyte_table_1": ("000", "Table №1."),
    "ironbyte_table_2": ("000", "Table № 2."),
    "ironbyte_table_3": ("000", "Table №3."),
    "ironbyte_table_4": ("000", "Table №4."),
    "ironbyte_slow_network": ("000", "<sup>2</sup>"),
    "kubernetes_5b": ("002", "Training benchmarking: GPT-3 / 5B"),
    "kubernetes_126m": ("002", "Training benchmarking: GPT-3 / 126M"),
    "kubernetes_memory": ("002", "LLMs don't fit into a single GPU"),
    "dissect_scaling_rtx4090": ("003", "2) *GPU Scaling Efficiency*"),
    "dissect_scaling_rtx3090": ("003", "2) *GPU Scaling Efficiency*"),
    "dissect_serving_rtx3090": ("003", "**Latency.**"),
    "dissect_serving_rtx4090": ("003", "**Latency.**"),
    "roce_epoch_time": ("004", "## Additional Information"),
} | {
    f"dissect_table_{number}": ("003", f"TABLE {roman}:")
    for number, roman in zip(
        (2, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16),
        ["II", "V", "VI", "VII", "VIII", "X", "XI", "XII", "XIII", "XIV", "XV", "XVI"],
        strict=True,
    )
}
"""The document of each file, and the text just before its figures."""
COLLECTED = ("training_per_gpu",)
"""Figures of many public pages, which are not among the documents."""


def read(name: str) -> PublishedTable:
    return published.read(PUBLISHED / f"{name}.yaml")


def one(name: str, measurement: str, **labels: str) -> Figure:
    (figure,) = (
        figure
        for figure in read(name).figures
        if figure.measurement == measurement and labels.items() <= figure.labels.items()
    )
    return figure


def lines_from(document: str, anchor: str) -> list[str]:
    """Return a document's lines from the first one with the anchor, without standard deviations and markup."""
    paths = sorted(DOCUMENTS.glob(f"{document}_*.txt"))
    if not paths:
        pytest.skip("the documents are not at hand")
    lines = paths[0].read_text("utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if anchor in line)
    return [re.sub(r"<sub>.*?</sub>|</?\w+>|\*\*", " ", line) for line in lines[start:]]


def rows_of(table: PublishedTable) -> Iterator[list[Figure]]:
    """Yield the figures of each row of the file."""
    width = len(yaml.safe_load((PUBLISHED / f"{table.name}.yaml").read_text()).get("columns", "1"))
    for start in range(0, len(table.figures), width):
        yield list(table.figures[start : start + width])


def are_in_order(expected_words: Sequence[str], tokens: Sequence[str]) -> bool:
    rest = iter(tokens)
    return all(token in rest for token in expected_words)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in COLLECTED and not re.match(r"dissect_table_[349]_", name)]
)
def test_each_row_is_printed_in_one_line_of_its_document(name: str) -> None:
    """Rows are searched in order, each in or below the line of the previous one."""
    document, anchor = ANCHORS[name]
    lines = [[token.strip("().,") for token in line.split()] for line in lines_from(document, anchor)]
    at = 0
    for row in rows_of(read(name)):
        expected_words = [token.strip("().,") for figure in row for token in figure.printed.split()]
        at = next((n for n, tokens in enumerate(lines) if n >= at and are_in_order(expected_words, tokens)), len(lines))
        assert at < len(lines), f"{expected_words} is in no line of the document, or above the row before"


@pytest.mark.parametrize("number", WIDE)
def test_a_wide_table_has_the_rows_and_cells_of_its_document(number: int) -> None:
    """The files of the four platforms next to each other equal the table, cell by cell."""
    width = 3 if number == 4 else 2
    printed = []
    for line in lines_from("003", f"TABLE {WIDE[number]}:")[1:]:
        cells = [cell.strip() for cell in line.split("\t")]
        if cells[0].startswith("TABLE"):
            break
        if len(cells) == 2 + 4 * width and cells[1] not in ("", "Method"):
            printed.append(cells[1:])
    files = [rows_of(read(f"dissect_table_{number}_{platform}")) for platform in PLATFORMS]
    ours = [
        [row[0][0].labels["method"], *(figure.printed for part in row for figure in part)]
        for row in zip(*files, strict=True)
    ]
    assert ours == printed


def test_a_value_per_gpu_is_the_printed_total_divided_by_the_gpus() -> None:
    """By hand: 7488.3 tokens/s of 8 GPUs; 185090 of 32."""
    naive = one("dissect_table_3_a800", "throughput_per_gpu", model="7B", method="Naive")
    assert (naive.value, naive.unit) == (pytest.approx(936.0375), "tokens/s/GPU")
    bare = one("kubernetes_5b", "throughput_per_gpu", system="bare metal", nodes="4")
    assert bare.value == pytest.approx(5784.0625)
    assert read("kubernetes_5b").title.endswith("(printed as totals of 8, 16, 32 GPUs and in %)")
    copies = one("dissect_table_14", "copies_total", model="7B", method="Z3")
    assert (copies.value, copies.unit) == (638, "ms") and read("dissect_table_14").title.endswith(
        "(printed in s and %)"
    )
    assert one("dissect_table_3_a800", "peak_memory", model="7B", method="Naive").value == 66.7


def test_misprints_are_corrected_with_a_reason() -> None:
    known = {
        ("dissect_table_4_a800", "throughput_per_gpu", "13B", "R+Z2+O"): ("640435", 6404.35 / 8, "no decimal point"),
        ("dissect_table_9_a800", "throughput_per_gpu", "13B", "L+F+R+Z3"): ("1912.9", 1912.9 / 8, "the label 70B"),
        ("dissect_table_9_a800", "throughput_per_gpu", "70B", "L+F+R+Z3"): ("967.3", 967.3 / 8, ""),
    }
    for (name, measurement, model, method), (printed, value, why) in known.items():
        figure = one(name, measurement, model=model, method=method)
        assert (figure.printed, figure.value) == (printed, pytest.approx(value)) and why in figure.reason
    comma = one("ironbyte_table_2", "time_per_token", system="groups", order="side by side", nodes="2")
    assert (comma.printed, comma.value) == ("0,0079", 0.0079)


def test_a_sign_in_place_of_a_number_has_no_value_and_a_reason() -> None:
    oom = one("dissect_table_3_rtx4090", "throughput_per_gpu", model="7B", method="Naive")
    assert (oom.printed, oom.value, oom.reason) == ("-", None, "out of memory")
    x = one("ironbyte_table_1", "run_time", work="70B pre-training, 100 steps", system="independent groups, 2 nodes")
    assert x.value is None and "averaging the weights takes longer" in x.reason
    star = one("ironbyte_table_3", "run_time", work="7B fine-tuning, 1 epoch", system="open source, 2 nodes, 80 Gbit/s")
    assert (star.printed, star.value, star.reason) == ("3750*", 3750, "calculated by the document")


@pytest.mark.parametrize("name", ["kubernetes_5b", "kubernetes_126m"])
@pytest.mark.parametrize("nodes", ["1", "2", "4"])
def test_the_difference_of_kubernetes_follows_from_its_two_rows(name: str, nodes: str) -> None:
    bare, kubernetes = (
        one(name, "throughput_per_gpu", system=system, nodes=nodes).value for system in ("bare metal", "Kubernetes")
    )
    assert bare and kubernetes
    assert one(name, "slower_by", nodes=nodes).value == pytest.approx(1 - kubernetes / bare, abs=0.00006)


@pytest.mark.parametrize("name", ["ironbyte_table_1", "ironbyte_table_3"])
def test_the_coefficients_of_ironbyte_follow_from_its_minutes(name: str) -> None:
    """A coefficient is the time over that of the independent groups on the same number of nodes."""
    coefficients = [figure for figure in read(name).figures if figure.measurement == "efficiency_coefficient"]
    for figure in coefficients:
        work, system = figure.labels["work"], figure.labels["system"]
        base = "independent groups, 1 node" if "1 node" in system else "independent groups, 2 nodes"
        times = [one(name, "run_time", work=work, system=which).value for which in (system, base)]
        if figure.value is not None:
            assert times[0] and times[1] and figure.value == pytest.approx(times[0] / times[1], abs=0.05)


def test_the_parts_of_a_generation_step_add_up() -> None:
    """Table X: three parts make up all of 51.11 ms, which is table XI's time too."""
    parts = ("computation", "communication", "other")
    times = [one("dissect_table_10", f"server_time_{part}").value or 0 for part in parts]
    shares = [one("dissect_table_10", f"server_share_{part}").value or 0 for part in parts]
    along = ("before_layers", "layers", "after_layers")
    whole = sum(one("dissect_table_11", f"server_time_{part}").value or 0 for part in along)
    assert sum(times) == pytest.approx(51.11) == pytest.approx(whole)
    assert shares == pytest.approx([time / 51.11 for time in times], abs=1e-4)


GOOD = """\
title: t
place: p
hardware: h
date: d
signs: {"-": out of memory}
columns: [{measurement: peak_memory, unit: GB}]
rows: [{labels: {model: 7B}, printed: ["1.5"]}]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["1.5"]', '["1.5", "2"]', "the row has 2 cells, but the table has 1 columns"),
        ('["1.5"]', '["fast"]', "the text 'fast', which is not a number"),
        ('["1.5"]', '["0,0079"]', "the text '0,0079', which is not a number"),
        ('["1.5"]', '["1210*"]', r"the text '1210\*', which is not a number"),
        (
            '["1.5"]',
            '["1"], corrected: [{column: 2, value: 1, reason: r}]',
            "`corrected` names column 2, but the table has only 1 columns",
        ),
        ("measurement: peak_memory, ", "", "the key `measurement` is missing"),
        ("title: t", "titel: t", "unknown field `titel`"),
        ("date: d\n", "", "missing required field `date`"),
        ("[{labels", "[{", "expected"),
        (
            "rows: [",
            'figures: [{measurement: a, printed: "1", value: 2}]\nrows: [',
            "the value 2 replaces the printed number '1', but no reason is given",
        ),
        ("rows: [", "figures: [{measurement: a, printed: fast}]\nrows: [", "the text 'fast', which is not a number"),
    ],
)
def test_a_wrong_file_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(GOOD)
    assert published.read(path).figures[0].value == 1.5
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as refused:
        published.read(path)
    assert str(path) in refused.value.where


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        published.read(tmp_path / "none.yaml")
