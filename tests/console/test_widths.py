"""Tables are readable at every terminal width; the whole output is compared."""

import pytest

from bench.console import plan
from bench.console.sheet import show
from bench.report.tables import TextTable
from helpers.screen import terminal

LAYOUTS = TextTable(
    "lora70b-dgx1, fp8",
    [
        *[("4", "2", "1", "1", "on", "none", "70.5", "yes", "2.92", "1.61", "0.70", "0.25", "0.35", "0", "0.00", "0")],
        *[("2", "1", "1", "4", "off", "qkv 80, fc1 39 of 80", "78.5", "no", "3.46", "1.62", *["0.70"] * 6)],
    ],
    (*plan.COLUMNS, *plan._PART_COLUMNS),
    "2 possible layouts",
    num_optional=7,
)
PROBLEMS = TextTable(
    "laptop: 1 check, 1 problem",
    [
        (
            "CFG-06",
            "error",
            "DATADIR is not set, and nothing can be read",
            "cluster=dgx2",
            "export DATADIR=/the/folder/of/rows",
        )
    ],
    ("rule", "severity", "what", "where", "fix"),
)


@pytest.mark.parametrize(
    ("sheet", "columns", "shown"),
    [
        (
            LAYOUTS,
            80,
            """\
lora70b-dgx1, fp8
                                                       step  GEMMs  attention
dp  tp  pp  cp  sp   recomputed layers      GiB  fits   (s)    (s)        (s)
──────────────────────────────────────────────────────────────────────────────
 4   2   1   1  on   none                  70.5  yes   2.92   1.61       0.70
 2   1   1   4  off  qkv 80, fc1 39 of 80  78.5  no    3.46   1.62       0.70
2 possible layouts
not shown (needs 120 columns of terminal width): element-wise (s), comm. (s),
recompute (s), bubble (s), host (s)
""",
        ),
        (
            LAYOUTS,
            120,
            """\
lora70b-dgx1, fp8
                                                                               element-
                                                       step  GEMMs  attention      wise  comm.  recompute  bubble  host
dp  tp  pp  cp  sp   recomputed layers      GiB  fits   (s)    (s)        (s)       (s)    (s)        (s)     (s)   (s)
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
 4   2   1   1  on   none                  70.5  yes   2.92   1.61       0.70      0.25   0.35          0    0.00     0
 2   1   1   4  off  qkv 80, fc1 39 of 80  78.5  no    3.46   1.62       0.70      0.70   0.70       0.70    0.70  0.70
2 possible layouts
""",
        ),
        (
            PROBLEMS,
            80,
            """\
laptop: 1 check, 1 problem
rule      CFG-06
severity  error
what      DATADIR is not set, and nothing can be read
where     cluster=dgx2
fix       export DATADIR=/the/folder/of/rows
""",
        ),
        (
            PROBLEMS,
            100,
            """\
laptop: 1 check, 1 problem
rule    severity  what                              where         fix
────────────────────────────────────────────────────────────────────────────────────────────────────
CFG-06  error     DATADIR is not set, and nothing   cluster=dgx2  export
                  can be read                                     DATADIR=/the/folder/of/rows
""",
        ),
    ],
)
def test_a_table_is_legible(monkeypatch: pytest.MonkeyPatch, sheet: TextTable, columns: int, shown: str) -> None:
    screen = terminal(monkeypatch, columns)
    show(sheet, file=screen)
    assert screen.text.strip("\n") == shown.strip("\n")
    assert max(map(len, screen.text.splitlines())) <= columns


def test_a_pipe_gets_every_column_at_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    show(LAYOUTS)
    title, *lines, caption = capsys.readouterr().out.splitlines()
    assert (title, caption) == (LAYOUTS.title, LAYOUTS.caption)
    assert [tuple(line.split("\t")) for line in lines] == [LAYOUTS.columns, *LAYOUTS.rows]


def test_only_verdicts_have_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, 80)
    show(TextTable("", [("valid trial", "yes", ""), ("target reached", "no", ""), ("seed", "7", "")]), file=screen)
    show(TextTable("", [("no", "no", "warning")], ("sp", "fits", "severity")), file=screen)
    coloured = screen.getvalue()
    assert coloured.count("\x1b[1;32myes\x1b[0m") == coloured.count("\x1b[1;31mno\x1b[0m") == 1
    assert coloured.count("\x1b[31mno") == coloured.count("\x1b[33mwarning") == 1
    assert "\x1b[1m7\x1b[0m" in coloured


def test_no_two_columns_of_layouts_have_one_name() -> None:
    assert len(set(LAYOUTS.columns)) == len(LAYOUTS.columns)
    assert [name.split(" ")[0] for name in LAYOUTS.columns].count("recompute") == 1
