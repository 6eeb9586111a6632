"""Rows of the fault matrix: what happens to the processes, the network, the files and the clock of a run."""

import shutil
import signal
from dataclasses import replace

import inflict
from breaking import drop_packets, reset_connections, send
from matrix import (
    ALERT,
    ANY_FAILURE,
    NOT_ASKED,
    ONE_NODE,
    ONE_TRIAL,
    TWO_TRIALS,
    UNHARMED,
    Answer,
    Fault,
    fails,
    recovers,
)

NOT_PROVEN = Answer(
    slurm="FAILED",
    outcome="not proven",
    exit_code=ANY_FAILURE,
    trials=("not proven",),
    attempts=("not proven",),
    rule="LOG-19",
    evidence="",
)

FINISHED_AND_ABORTED = ("proven", "aborted")

ROWS = (
    # --- Processes
    Fault(
        name="batch script: SIGKILL",
        inflict=inflict.kill_batch_script,
        answer=Answer(
            slurm="FAILED",
            outcome=None,
            exit_code=None,
            trials=("running",),
            attempts=("running",),
            rule="RUN-02",
            evidence=r"STEP .* FAILED \(non-zero exit code",
        ),
    ),
    Fault(
        name="srun: SIGKILL",
        inflict=inflict.kill_srun,
        answer=fails("RUN-02", "Killed"),
    ),
    Fault(
        name="rank: SIGKILL",
        inflict=send(signal.SIGKILL),
        answer=fails("RUN-02", "dgx-1: task 1: Killed", trials=FINISHED_AND_ABORTED),
        overrides=TWO_TRIALS,
        trial=1,
        in_gate=True,
    ),
    Fault(
        name="rank: SIGTERM",
        inflict=send(signal.SIGTERM),
        answer=fails("RUN-02", "143"),
    ),
    Fault(
        name="rank: SIGSEGV",
        inflict=send(signal.SIGSEGV),
        answer=fails("RUN-04", "Segmentation fault"),
    ),
    Fault(
        name="rank: the loss is not a number",
        inflict=lambda scene: None,
        answer=fails("RUN-05", "the training loss is (nan|inf)", trials=("aborted", "planned")),
        overrides=(*TWO_TRIALS, "recipe.lr=1e30", "recipe.clip_grad=1e30"),
        trial=None,
        in_gate=True,
    ),
    Fault(
        name="rank: an unknown exception",
        start=inflict.with_python_that(inflict.FAILS),
        inflict=lambda scene: None,
        answer=fails("RUN-13", r"KeyError: 'no such expert' \(at .*sitecustomize.py:\d+ in fail"),
        trial=None,
    ),
    Fault(
        name="rank: hangs",
        inflict=send(signal.SIGSTOP),
        answer=fails("RUN-17", "rank 1"),
        overrides=(*ONE_TRIAL, *ALERT),
    ),
    Fault(name="rank: paused for 6 s", inflict=inflict.pause_rank, answer=UNHARMED),
    Fault(
        name="launcher killed",
        start=inflict.launched_and_followed,
        inflict=inflict.kill_launcher,
        answer=UNHARMED,
    ),
    Fault(name="second launch into the folder", inflict=inflict.launch_again, answer=UNHARMED),
    # --- Network
    Fault(
        name="sockets reset",
        inflict=reset_connections,
        answer=fails("NCC-06", "gloo|Connection (reset|closed)"),
    ),
    Fault(
        name="packets dropped",
        inflict=drop_packets,
        answer=fails("RUN-17", "rank"),
        overrides=(*ONE_TRIAL, *ALERT),
    ),
    Fault(
        name="packets dropped for 5 s",
        inflict=lambda scene: drop_packets(scene, for_s=5),
        answer=UNHARMED,
    ),
    # --- Files
    Fault(
        name="data gone",
        start=inflict.with_own_cache,
        inflict=inflict.remove_data,
        answer=fails("CFG-06", "tiny_report", trials=FINISHED_AND_ABORTED),
        overrides=(*ONE_NODE, "trials=2"),
        in_gate=True,
    ),
    Fault(
        name="disk full",
        start=inflict.on_small_disk,
        inflict=inflict.fill_disk,
        answer=fails("CFG-08", "No space left", trials=FINISHED_AND_ABORTED),
        overrides=(*ONE_NODE, "trials=2"),
        trial=1,
        in_gate=True,
        cannot=inflict.no_small_disk,
    ),
    Fault(
        name="ledger halved",
        inflict=inflict.halve("ledger.json"),
        overrides=TWO_TRIALS,
        trial=1,
        answer=Answer(
            slurm="FAILED",
            outcome="failed",
            exit_code=ANY_FAILURE,
            trials=(),
            attempts=(),
            rule="RUN-10",
            evidence="the ledger cannot be read",
        ),
    ),
    Fault(
        name="status removed",
        inflict=inflict.kill_rank_and_remove_status,
        answer=replace(fails("RUN-02", "task 1: Killed"), outcome=None, exit_code=None),
    ),
    Fault(
        name="foreign log copied in",
        inflict=inflict.copy_foreign_log,
        overrides=TWO_TRIALS,
        answer=replace(
            fails("LOG-17", "not written by this attempt", trials=FINISHED_AND_ABORTED), attempts=("aborted: LOG-17",)
        ),
        in_gate=True,
    ),
    Fault(name="log edited after the end", inflict=inflict.edit_log_after_the_end, answer=UNHARMED),
    Fault(
        name="symlinks planted in the folder",
        start=inflict.into_planted_folder,
        inflict=inflict.look_at_victim,
        answer=Answer(
            slurm="FAILED",
            outcome=None,
            exit_code=None,
            trials=(),
            attempts=(),
            rule="CFG-11",
            evidence="belongs to somebody else",
        ),
        trial=None,
    ),
    Fault(
        name="run folder removed",
        inflict=lambda scene: shutil.rmtree(scene.run.folder),
        answer=Answer(slurm="FAILED", outcome=None, exit_code=None, trials=(), attempts=(), rule=NOT_ASKED),
        overrides=ONE_NODE,
        in_gate=True,
    ),
    Fault(
        name="image replaced",
        start=inflict.from_own_image,
        inflict=inflict.replace_image,
        answer=recovers(trials=2),
        overrides=TWO_TRIALS,
        cannot=inflict.no_container,
    ),
    # --- Clock
    Fault(
        name="clock set back by 8 s",
        start=inflict.with_python_that(inflict.CLOCK),
        inflict=inflict.move_clock(-8),
        answer=NOT_PROVEN,
    ),
    Fault(
        name="clock put forward by 2 h",
        start=inflict.with_python_that(inflict.CLOCK),
        inflict=inflict.move_clock(7200),
        answer=NOT_PROVEN,
    ),
)
