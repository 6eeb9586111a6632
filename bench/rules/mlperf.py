"""Texts of the rules about logs, scores and packages of MLPerf.

Each is ID -> (what is wrong, how to fix it).
"""

from bench.rules.cluster import Texts

LOG: Texts = {
    "LOG-01": ("run_start is missing", "log run_start after initialisation, before any data is read"),
    "LOG-02": (
        "run_stop is missing",
        "find out what ended the run, and run it again; without run_stop, the run has no time",
    ),
    "LOG-03": (
        "run_start or run_stop is logged more than once, for example because a second trial was appended to the log",
        "write each trial to its own new file (never `>>` or `tee -a`), and run this trial again",
    ),
    "LOG-04": (
        "the events are in the wrong order",
        "log init_start, init_stop, run_start, run_stop in this order, on one rank",
    ),
    "LOG-05": (
        "run_stop does not have the status success",
        "find out why the run was aborted; only a successful run has a time to train",
    ),
    "LOG-06": (
        "the log has no evaluation",
        "train until after the first evaluation: raise max_steps, or find out what ended the run earlier",
    ),
    "LOG-07": (
        "the last evaluation misses the target",
        "train longer, or tune the hyperparameters; such a run counts as not converged",
    ),
    "LOG-08": (
        "a value is not a finite number",
        "find the first step with such a value; lower the learning rate or clip gradients",
    ),
    "LOG-09": (
        "a log record is malformed",
        "write the log on one rank without a buffer, to a file that no other process writes to; never edit a log",
    ),
    "LOG-10": ("a required key is missing", "log every key that the benchmark's rule file requires"),
    "LOG-11": ("a key that must occur once occurs several times", "log the key once, on one rank"),
    "LOG-12": (
        "the target is easier than the official one",
        "set task.training.target_eval_loss to the official target",
    ),
    "LOG-13": ("an evaluation is outside the timed part", "evaluate only between run_start and run_stop"),
    "LOG-14": (
        "initialisation takes longer than the rules allow",
        "make checkpoint loading and compilation faster; the limit is 30 min, and 240 min in the open division",
    ),
    "LOG-15": (
        "the seed is missing, is not an integer, or is logged with different values",
        "log one integer as the seed, and a different seed for each run",
    ),
    "LOG-16": (
        "the data is random tokens, so the log measures only speed (no time to train, no score)",
        "`runstop report` compares the speed; for a time to train set model.weights=checkpoint",
    ),
    "LOG-17": (
        "the log was not written by this attempt of the trial",
        "find out which program wrote the log; `runstop resume RUN` renames the log, and runs the trial again",
    ),
    "LOG-18": (
        "the log, or a file that belongs to it, was changed after it was written",
        "restore the original file, or run the trial again: a changed log is not valid",
    ),
    "LOG-19": (
        "the system clock was changed during the run, so the logged times are wrong",
        "configure chronyd or ntpd to step the clock only at boot and to slew it afterwards; then run the trial again",
    ),
    "LOG-20": (
        "the run took longer than all its steps and evaluations together",
        "find out where the time was spent (a suspended machine, a file system that hung), or whether the clock "
        "or the log file was changed",
    ),
    "LOG-21": (
        "the trial was resumed from a checkpoint, so its log covers only a part and has no time to train",
        "step times, speed and losses are those of this part; for a time to train, run a trial without interruption",
    ),
    "LOG-22": (
        "the times of the log are too short for the speed that the run itself measured",
        "find out which program changed time_ms or the tracked values; score only logs as their run wrote them",
    ),
    "LOG-23": (
        "runstop has no rules for the benchmark of this log, so the trial is not judged",
        "correct the name of the benchmark; for maskrcnn and older benchmarks use MLPerf's own checker: "
        "`runstop parse FILE --official 3.1.0`",
    ),
    "LOG-24": (
        "the program of engine=command computed the losses and evaluations",
        "runstop timed the steps, but did not compute the losses; compare the losses with those of another program",
    ),
    "LOG-25": (
        "the program's own times contradict the runner's clock",
        "let the program print each step at once (no buffer), and time whole steps; the results use the runner's clock",
    ),
    "LOG-26": (
        "MLPerf's own checker refuses the log",
        "`runstop parse LOG --official RULESET` prints what it refuses. If a program logs by the rules of an earlier "
        "round, set engine.command.ruleset",
    ),
    "LOG-27": (
        "two measurements of a GPU's energy disagree",
        "do not use either value; compare with a power meter. The power may be sampled too seldom for a load that"
        " changes fast, or the driver may have an error",
    ),
    "REC-01": (
        "a value differs from the value that the rules fix",
        "set the value that the rules require, or submit to the open division",
    ),
    "REC-02": (
        "the number of data rows differs from the rules",
        "prepare the data again, and train and evaluate on all of it",
    ),
    "REC-03": ("the submitter or the platform is not named", "set cluster.org and cluster.platform"),
    "EVL-01": (
        "evaluations are not at the samples that the rules require",
        "evaluate every CEIL(384 / GBS) steps, from the first required evaluation on; see CFG-03",
    ),
    "EVL-02": (
        "the target was reached at an evaluation that is not in the rules' schedule",
        "evaluate only at the samples of the rules' schedule",
    ),
    "EVL-03": ("an evaluation has no samples_count", "log samples_count with every eval_accuracy"),
}

SCORE: Texts = {
    "SCO-01": (
        "the number of runs is not the number that a score needs",
        "run the missing trials, each with a new seed",
    ),
    "SCO-02": (
        "more runs failed than the score may drop",
        "find the cause of each failed run with `runstop why`, and run these trials again",
    ),
    "SCO-03": ("several runs have the same seed", "run one of these runs again with another seed (seed_base)"),
    "SCO-04": ("the runs have different settings", "score only runs of the same plan together"),
    "SCO-05": (
        "the convergence of the runs differs from the reference",
        "compare hyperparameters and data with those of the reference; see RUN-06",
    ),
    "SCO-06": (
        "there are no official rules for these runs",
        "score a benchmark and batch size that the official rules cover",
    ),
    "SCO-07": (
        "several logs are copies of one run",
        "keep one of these logs, and run the missing trials, each with a new seed. A score needs independent runs",
    ),
    "PCK-01": (
        "the number of runs of a benchmark is not the number that its rules require",
        "run the missing trials, each with a new seed",
    ),
    "PCK-02": ("a log is not a valid trial", "exclude that run, or run the trial again"),
    "PCK-03": ("the task is not an MLPerf submission task", "choose a task of the benchmark, such as task=lora70b"),
    "PCK-04": ("the runs of one benchmark have different settings", "pack only runs of the same plan together"),
    "PCK-05": (
        "the log has the name of another organization",
        "set --org to the logged organization, or set cluster.org and run again",
    ),
    "PCK-06": (
        "the power in a package is not the power of whole nodes",
        "record each node at its power supplies. runstop records nodes with an ACPI power meter. For other nodes,"
        " give the readings of a meter with --meter. Or pack without --power",
    ),
    "PCK-07": (
        "the power of a run was not measured as MLPerf's power rules require",
        "give complete readings of every node with --meter, run the trial again, or pack without --power",
    ),
    "PCK-08": (
        "the nodes of a run used less energy than their GPUs",
        "check the unit of the meter, the nodes that it measures, and --psu-efficiency",
    ),
    "PCK-09": (
        "the power of the switches between the nodes is missing",
        "give --switch-watts for each switch: its maximum specified power, times the share of the switch that the"
        " run uses",
    ),
    "PCK-10": (
        "fields of a system description are empty, or not numbers",
        "set these fields in cluster.system_description before the run, or give a file <system>.json with --describe",
    ),
    "PCK-11": (
        "MLPerf's own checkers refuse the package",
        "correct the problem that the checker names, and pack again",
    ),
    "PCK-12": (
        "the nodes of a system differ, but its description has only one value",
        "describe the field for all nodes in cluster.system_description or with --describe; or run on equal nodes",
    ),
}
