"""Rows of the fault matrix: faults of the processes, the network, the files and the clock of a run."""

import shutil
import signal
from dataclasses import replace

import fault_actions
from fault_injection import drop_packets, reset_connections, send
from fault_matrix import (
    ALERT,
    ANY_FAILURE,
    ANY_RULE,
    ONE_NODE,
    ONE_TRIAL,
    TWO_TRIALS,
    UNHARMED,
    Answer,
    Fault,
    fails,
    recovers,
)

INVALID = Answer(
    slurm="FAILED",
    outcome="invalid",
    exit_code=ANY_FAILURE,
    trials=("invalid",),
    attempts=("invalid",),
    rule="LOG-19",
    evidence="",
)

WITHOUT_LEDGER = Answer(
    slurm="FAILED",
    outcome="failed",
    exit_code=ANY_FAILURE,
    trials=(),
    attempts=(),
    rule="RUN-10",
    evidence="the ledger cannot be read",
)

FINISHED_AND_ABORTED = ("valid", "aborted")

ROWS = (
    # --- Processes
    Fault(
        name="batch script: SIGKILL",
        inject=fault_actions.kill_batch_script,
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
        inject=fault_actions.kill_srun,
        answer=fails("RUN-02", "Killed"),
    ),
    Fault(
        name="rank: SIGKILL",
        inject=send(signal.SIGKILL),
        answer=fails("RUN-02", "dgx-1: task 1: Killed", trials=FINISHED_AND_ABORTED),
        overrides=TWO_TRIALS,
        trial=1,
        in_gate=True,
    ),
    Fault(
        name="rank: SIGTERM",
        inject=send(signal.SIGTERM),
        answer=fails("RUN-02", "143"),
    ),
    Fault(
        name="rank: SIGINT",
        inject=send(signal.SIGINT),
        answer=fails("RUN-02", "signal 2|130|KeyboardInterrupt"),
    ),
    Fault(
        name="rank: SIGSEGV",
        inject=send(signal.SIGSEGV),
        answer=fails("RUN-04", "Segmentation fault"),
    ),
    Fault(
        name="rank: the loss is not a number",
        inject=lambda scene: None,
        answer=fails("RUN-05", "the training loss is (nan|inf)", trials=("aborted", "planned")),
        overrides=(*TWO_TRIALS, "recipe.lr=1e30", "recipe.clip_grad=1e30"),
        trial=None,
        in_gate=True,
    ),
    Fault(
        name="rank: an unknown exception",
        start=fault_actions.with_python_that(fault_actions.FAILS),
        inject=lambda scene: None,
        answer=fails("RUN-13", r"KeyError: 'no such expert' \(at .*sitecustomize.py:\d+ in fail"),
        trial=None,
    ),
    Fault(
        name="rank: hangs",
        inject=send(signal.SIGSTOP),
        answer=fails("RUN-17", "rank 1"),
        overrides=(*ONE_TRIAL, *ALERT),
    ),
    Fault(name="rank: paused for 6 s", inject=fault_actions.pause_rank, answer=UNHARMED),
    Fault(
        name="the step that writes the final status: SIGKILL",
        inject=fault_actions.kill_close,
        answer=replace(UNHARMED, slurm="FAILED"),
        overrides=ONE_NODE,
    ),
    Fault(
        name="launcher killed",
        start=fault_actions.launched_and_followed,
        inject=fault_actions.kill_launcher,
        answer=UNHARMED,
    ),
    Fault(name="second launch into the folder", inject=fault_actions.launch_again, answer=UNHARMED),
    # --- Network
    Fault(
        name="sockets reset",
        inject=reset_connections,
        answer=fails("NCC-06", "gloo|Connection (reset|closed)"),
    ),
    Fault(
        name="packets dropped",
        inject=drop_packets,
        answer=fails("RUN-17", "rank"),
        overrides=(*ONE_TRIAL, *ALERT),
    ),
    Fault(
        name="packets dropped for 5 s",
        inject=lambda scene: drop_packets(scene, for_s=5),
        answer=UNHARMED,
    ),
    Fault(
        name="rendezvous port in use",
        inject=fault_actions.take_ports,
        answer=recovers("NCC-05: the rendezvous port is in use"),
        trial=None,
        alone=True,
    ),
    # --- Files
    Fault(
        name="evaluation rows changed between trials",
        start=fault_actions.with_own_cache,
        inject=fault_actions.change_rows_after_a_trial,
        answer=fails("CFG-12", "the tokens or counts of row 0 were changed", trials=FINISHED_AND_ABORTED),
        overrides=(*ONE_NODE, "trials=2"),
    ),
    Fault(
        name="base checkpoint changed between trials",
        start=fault_actions.with_own_cache,
        inject=fault_actions.change_base_after_a_trial,
        answer=fails("CFG-12", "the weights were changed: __0_0.distcp", trials=FINISHED_AND_ABORTED),
        overrides=(*ONE_NODE, "trials=2"),
    ),
    Fault(
        name="file of rows truncated while ranks read it",
        start=fault_actions.with_own_cache,
        inject=fault_actions.truncate_rows,
        answer=fails("RUN-04", "Bus error"),  # the fix names the shorter file
        overrides=ONE_NODE,
    ),
    Fault(
        name="plan edited while a trial runs",
        inject=fault_actions.edit_plan,
        answer=replace(fails("CFG-12", "plan.json was changed", trials=("invalid", "planned")), attempts=("invalid",)),
        overrides=TWO_TRIALS,
    ),
    Fault(
        name="ledger removed",
        inject=fault_actions.remove("ledger.json"),
        overrides=TWO_TRIALS,
        trial=1,
        answer=WITHOUT_LEDGER,
    ),
    Fault(
        name="log removed",
        inject=fault_actions.remove("result_0.txt"),
        answer=fails("LOG-01", "result_0.txt"),
    ),
    Fault(
        name="data gone",
        start=fault_actions.with_own_cache,
        inject=fault_actions.remove_data,
        answer=fails("CFG-06", "tiny_report", trials=FINISHED_AND_ABORTED),
        overrides=(*ONE_NODE, "trials=2"),
        in_gate=True,
    ),
    Fault(
        name="disk full",
        start=fault_actions.on_small_disk,
        inject=fault_actions.fill_disk,
        answer=fails("CFG-08", "No space left", trials=FINISHED_AND_ABORTED),
        overrides=(*ONE_NODE, "trials=2"),
        trial=1,
        in_gate=True,
        cannot=fault_actions.no_small_disk,
    ),
    Fault(
        name="ledger halved",
        inject=fault_actions.halve("ledger.json"),
        overrides=TWO_TRIALS,
        trial=1,
        answer=WITHOUT_LEDGER,
    ),
    Fault(
        name="status removed",
        inject=fault_actions.kill_rank_and_remove_status,
        answer=replace(fails("RUN-02", "task 1: Killed"), outcome=None, exit_code=None),
    ),
    Fault(
        name="log of another trial copied in",
        inject=fault_actions.copy_log_of_another_trial,
        overrides=TWO_TRIALS,
        answer=replace(
            fails("LOG-17", "not written by this attempt", trials=FINISHED_AND_ABORTED), attempts=("aborted: LOG-17",)
        ),
        in_gate=True,
    ),
    Fault(name="log edited after the end", inject=fault_actions.edit_log_after_the_end, answer=UNHARMED),
    Fault(
        name="symlinks planted in the folder",
        start=fault_actions.into_planted_folder,
        inject=fault_actions.look_at_victim,
        answer=Answer(
            slurm="FAILED",
            outcome=None,
            exit_code=None,
            trials=(),
            attempts=(),
            rule="CFG-11",
            evidence="another user owns",
        ),
        trial=None,
    ),
    Fault(
        name="run folder removed",
        inject=lambda scene: shutil.rmtree(scene.run.folder),
        answer=Answer(slurm="FAILED", outcome=None, exit_code=None, trials=(), attempts=(), rule=ANY_RULE),
        overrides=ONE_NODE,
        in_gate=True,
    ),
    Fault(
        name="image replaced",
        start=fault_actions.from_own_image,
        inject=fault_actions.replace_image,
        answer=recovers(trials=2),
        overrides=TWO_TRIALS,
        cannot=fault_actions.no_container,
    ),
    # --- Clock
    Fault(
        name="clock set back by 8 s",
        start=fault_actions.with_python_that(fault_actions.CLOCK),
        inject=fault_actions.move_clock(-8),
        answer=INVALID,
    ),
    Fault(
        name="clock 0.95 s ahead until the run has started",
        start=fault_actions.with_python_that(fault_actions.CLOCK, clock_s=0.95),
        inject=fault_actions.move_clock(0),
        answer=INVALID,
    ),
    Fault(
        name="clock put forward by 2 h",
        start=fault_actions.with_python_that(fault_actions.CLOCK),
        inject=fault_actions.move_clock(7200),
        answer=INVALID,
    ),
)
