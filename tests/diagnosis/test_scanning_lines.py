"""How lines of a log are found and shown: keywords of patterns, frames of tracebacks, and the texts of clues."""

import pytest

from bench.diagnosis import log_scan
from bench.diagnosis.log_scan import Clue, Frame
from bench.rules.signs import Weight


@pytest.mark.parametrize(
    ("pattern", "keywords"),
    [
        (rb"abc", {b"abc"}),
        (rb"ab", set()),
        (rb"ABc[Dd]", {b"abcd"}),
        (rb"node 7[39] down", {b"node 22 down"}),
        (rb"[a-c]bcd", {b"bcd"}),
        (rb"[ab]bcd", {b"bcd"}),
        (rb"\d+ long text \d short", {b" long text "}),
        (rb"(?:first|second)", {b"first", b"second"}),
        (rb"(?:first|x)", set()),
        (rb"(?:first|x) then", {b" then"}),
        (rb"(?:fooa|foob)", {b"foo"}),
        (rb"pre(?:first|second)", {b"prefirst", b"presecond"}),
        (rb"(?:maybe)?always", {b"always"}),
        (rb"(?:maybe)*", set()),
        (rb"(?:twice)+ x", {b"twice"}),
        (rb"(one)(three)", {b"three"}),
        (rb"an [Ee]rror in a very long sentence", {b"error"}),
        (rb"error\d a longer text", {b"error"}),
        (rb"rank\d+ abcd", {b" abcd"}),
        (rb"rank\d+", {b"rank"}),
        (rb"loss\d (?:memory|abc)", {b"memory", b" abc"}),
    ],
)
def test_each_match_of_a_pattern_contains_one_of_its_keywords(pattern: bytes, keywords: set[bytes]) -> None:
    assert log_scan.keywords_of_pattern(pattern) == keywords


def test_a_pattern_without_keyword_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this pattern has no keyword: b'\[a-z\]\+'"):
        log_scan.keywords_of_signs((b"[a-z]+",))
    words = log_scan.keywords_of_signs((b"xyzzy plugh",))
    assert b"xyzzy plugh" in words and not [one for one in words for other in words if one != other and other in one]


def test_lines_with_a_keyword_are_found_and_long_ones_in_part() -> None:
    boring = set[bytes]()
    text = b"step 1\nAn Error 7\nstep 9\n\nerror"
    assert [text[a:b] for a, b in log_scan.candidate_lines(text, boring, [b"error"])] == [b"An Error 7", b"error"]
    assert boring == {b"step 1", b"step 2", b""}
    assert list(log_scan.candidate_lines(b"step 5\nerror 3", boring, [b"error 2"])) == [(7, 14)]
    long = b"x" * 2000 + b"error" + b"y" * 5000 + b"error" + b"z" * 100
    places = list(log_scan.candidate_lines(b"a\n" + long, boring, [b"error"]))
    assert places == [(2 + 1000, 2 + 5000), (2 + 6005, 2 + len(long))], "1,000 bytes before and 3,000 after"
    assert list(log_scan.candidate_lines(b"e" * 1001, boring, [b"error"])) == []
    assert b"e" * 1000 not in boring and b"e" * 1001 not in boring, "long lines are not kept"
    list(log_scan.candidate_lines(b"e" * 1000, boring, [b"error"]))
    assert b"e" * 1000 in boring
    short = b"x" * 995 + b"error"
    assert list(log_scan.candidate_lines(short, boring, [b"error"])) == [(0, 1000)]


TRACEBACK = b"""Traceback (most recent call last):
  File "/home/me/train.py", line 12, in main
    step()
  File "/home/me/model.py", line 7
    raise_()
  File "/usr/lib/python3.12/site-packages/torch/x.py", line 900, in raise_
    raise ValueError
"""


def test_the_innermost_frame_of_own_code_is_found() -> None:
    own = Frame(b"/home/me/model.py", b"7", b"")
    assert log_scan.innermost(TRACEBACK, b"ValueError: x") == own
    assert str(own) == "/home/me/model.py:7" and own.is_own
    assert str(Frame(b"a.py", b"7", b"f")) == "a.py:7 in f"
    labelled = b"".join(b"[rank1]: " + line + b"\n[rank0]: step\n" for line in TRACEBACK.splitlines())
    assert log_scan.innermost(labelled, b"[rank1]: ValueError: x") == own
    assert log_scan.innermost(labelled, b"[rank2]: ValueError: x") is None
    assert log_scan.innermost(labelled, b"ValueError: x") is None
    by_srun = b"".join(b" 1: " + line + b"\n" for line in TRACEBACK.splitlines())
    assert log_scan.innermost(by_srun, b" 1: ValueError: x") == own
    installed = b"".join(TRACEBACK.splitlines(keepends=True)[5:])
    inner = log_scan.innermost(installed, b"ValueError: x")
    assert inner == Frame(b"/usr/lib/python3.12/site-packages/torch/x.py", b"900", b"raise_") and not inner.is_own
    for path in (b"a/dist-packages/b", b"/usr/lib/python3.9/c", b"<frozen runpy>", b"<string>"):
        assert not Frame(path, b"1", b"").is_own
    assert log_scan.innermost(TRACEBACK + b"other output\n", b"ValueError: x") is None
    assert log_scan.innermost(TRACEBACK + b"\n\n", b"ValueError: x") == own
    far = TRACEBACK + b"".join(b"[rank9]: %060d\n" % n for n in range(1000))
    assert log_scan.innermost(far, b"ValueError: x") is None, "only the last 65,536 bytes are read"


def test_a_line_is_shown_without_control_characters_and_at_most_400_characters() -> None:
    assert log_scan.shown(b" \x1b[31mred\x1b[0m \xff ") == "red \N{REPLACEMENT CHARACTER}"
    assert log_scan.shown(b"a" * 400) == "a" * 400
    assert log_scan.shown(b"a" * 401) == "a" * 399 + "…"


def test_clues_of_own_errors_have_the_rule_of_their_text() -> None:
    read = log_scan.read_message
    assert read("SLU-02: no partition", "set one", file="f", line=3) == Clue(
        "SLU-02", Weight.CAUSE, "f", 3, "SLU-02: no partition", "set one"
    )
    assert read("3: CFG-01: bad", "x", file="f") == Clue("CFG-01", Weight.CAUSE, "f", 1, "3: CFG-01: bad", "x")
    assert read("ZZZ-99: odd", "x", file="f") == Clue("RUN-10", Weight.CAUSE, "f", 1, "ZZZ-99: odd", "x")
    assert read("odd", "x", file="f", otherwise="RUN-13").rule == "RUN-13"
    memory = "torch.OutOfMemoryError: CUDA out of memory."
    assert read(memory, "x", file="f").rule == "RUN-01"
    assert read("RUN-20: the program ended", "x", file="f").weight is Weight.CAUSE
    assert read("RUN-20: the program ended: BrokenPipeError", "x", file="f").weight is Weight.END
    assert read("RUN-02: ended: BrokenPipeError", "x", file="f").weight is Weight.CAUSE
    clue = log_scan.rule_clue("CFG-01", "bad", None, file="f")
    assert clue == Clue("CFG-01", Weight.CAUSE, "f", 1, "CFG-01: bad", None)
    text = log_scan.read_text(f"a\nb\n{memory}\n", file="f", line=9)
    assert [(one.rule, one.line, one.text) for one in text.clues] == [("RUN-01", 9, memory)]


def test_a_log_shows_its_last_exception_three_errors_and_three_lines() -> None:
    lines = ["ERROR: zero", "MyError: raised", "ERROR: one", "Fatal: two", "ERROR: three", "a", "b", "", "c", "d"]
    scan = log_scan.read_text("\n".join(lines) + "\n:::MLLOG {}\n", file="f")
    assert scan.lines == ("MyError: raised", "ERROR: one", "Fatal: two", "ERROR: three", "b", "c", "d")
    assert scan.has_records and not log_scan.read_text("a\n", file="f").has_records
    restarted = log_scan.read_text(
        "torch.OutOfMemoryError: CUDA out of memory.\njob 7, restart 1, on node\nstep 1\n", file="f"
    )
    assert restarted.clues == () and [clue.rule for clue in restarted.earlier] == ["RUN-01"]
    assert restarted.lines == (*("torch.OutOfMemoryError: CUDA out of memory.", "job 7, restart 1, on node", "step 1"),)


@pytest.mark.parametrize(("records", "is_hint"), [(10, False), (11, True)])
def test_a_problem_before_more_than_ten_records_did_not_end_the_run(records: int, is_hint: bool) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory.\n" + ':::MLLOG {"key": "train_loss"}\n' * records
    (clue,) = log_scan.read_text(text, file="f").clues
    assert clue.rule == "RUN-01" and (clue.weight is Weight.HINT) == is_hint
