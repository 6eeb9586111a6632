"""What a trial's log says about the program that it ran."""

from pathlib import Path

from bench.contract import atomic_files, mllog
from bench.contract.program import Adapter, Program
from bench.mlperf import reader
from jobs.command import describe, words


def test_the_log_has_the_words_of_the_program_and_the_checksum_of_its_script(tmp_path: Path) -> None:
    """Of files that the words name, each once; data is too large to be a program."""
    script, rows, path = tmp_path / "train.py", tmp_path / "rows.bin", tmp_path / "result_0.txt"
    script.write_text("print(1)\n")
    with rows.open("wb") as file:
        file.truncate(describe.MAX_HASHED_BYTES + 1)
    argv = ["python", "train.py", "--seed={seed}", "rows.bin", "train.py"]
    settings = Program(argv=argv, adapter=Adapter.mllog, folder=str(tmp_path), ruleset="5.0.0")
    with mllog.Writer(path) as log:
        describe.program(words.with_values(settings, {"seed": "7"}), settings, log)
    (program, checksum), _ = reader.read(path)
    assert program.value == argv and program.metadata["placeholders"] == ["seed"]
    assert (program.metadata["adapter"], program.metadata[mllog.RULESET]) == ("mllog", "5.0.0")
    assert (checksum.key, checksum.value) == (mllog.INPUT_SHA256, atomic_files.sha256(script))
    assert checksum.metadata["input"] == "program train.py"
