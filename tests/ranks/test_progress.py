"""Progress lines of long work, with a fake clock."""

from collections.abc import Iterator

from jobs.ranks.progress import Progress, tracked


def test_a_line_has_share_rate_and_remaining_time() -> None:
    now_s = [50.0]
    progress = Progress("written", 128.0, "GiB", now=lambda: now_s[0])
    assert progress.line() == "written: 0% of 128 GiB"
    progress.add(8)
    now_s[0] += 16  # 8 of 128 in 16 s: 0.5 a second, and 120 left take 240 s
    assert progress.line() == "written: 6% of 128 GiB, 0.5 GiB/s, 4:00 left"
    progress.add(120)
    assert progress.line().endswith("100% of 128 GiB, 8 GiB/s, 0:00 left")


def test_short_work_prints_nothing_and_long_work_a_line_every_ten_seconds() -> None:
    now_s, lines = [0.0], list[str]()

    def rows(seconds_each: float) -> Iterator[int]:
        for row in range(100):
            now_s[0] += seconds_each
            yield row

    def run(seconds_each: float) -> list[str]:
        lines.clear()
        items = tracked(
            rows(seconds_each), what="rows", total=100, unit="rows", write=lines.append, now=lambda: now_s[0]
        )
        assert [*items] == [*range(100)]
        return lines

    assert run(0.09) == []
    assert run(0.5)[:2] == ["rows: 20% of 100 rows, 2 rows/s, 0:40 left", "rows: 40% of 100 rows, 2 rows/s, 0:30 left"]
    assert len(lines) == 5
