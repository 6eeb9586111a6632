"""Texts of the rules about logs, scores and packages of MLPerf.

Each is ID -> (what is wrong, what to do).
"""

from bench.rules.cluster import Texts

LOG: Texts = {
    "LOG-01": ("the clock never starts", "log run_start when initialisation is over, before any data is read"),
    "LOG-02": ("the clock never stops", "find out what ended the run, and run it again: there is no time to score"),
    "LOG-03": (
        "the clock starts or stops more than once, as in a log that was appended to",
        "write each trial to a file of its own, opened exclusively (never `>>` or `tee -a`), and run this one again",
    ),
    "LOG-04": (
        "events stand in the wrong order",
        "log init_start, init_stop, run_start, run_stop in this order, on one rank",
    ),
    "LOG-05": (
        "the run does not say that it succeeded",
        "find out why it was aborted; only a run that succeeded has a time",
    ),
    "LOG-06": (
        "nothing was evaluated",
        "train past the first evaluation: raise max_steps, or see what ended the run before",
    ),
    "LOG-07": ("the last evaluation misses the target", "train longer or tune; the run counts as not converged"),
    "LOG-08": (
        "a value is not a finite number",
        "find the step where it first was none; lower the learning rate or clip",
    ),
    "LOG-09": (
        "a record is garbled",
        "let one rank write the log, unbuffered, to a file that nothing else prints to; never edit a log",
    ),
    "LOG-10": ("a required key is missing", "log every key that the benchmark's rule file asks for"),
    "LOG-11": ("a key that stands once stands several times", "log it on one rank, once"),
    "LOG-12": (
        "the target is easier than the official one",
        "set task.training.target_eval_loss to the official target",
    ),
    "LOG-13": ("an evaluation stands outside run_start to run_stop", "evaluate only while the clock runs"),
    "LOG-14": (
        "initialisation takes longer than is allowed",
        "make checkpoint loading and compilation faster: 30 min, open 240",
    ),
    "LOG-15": (
        "the seed is missing, not a whole number, or not the only one",
        "log one whole number as seed, another for each run",
    ),
    "LOG-16": (
        "the rows are random numbers, so the log proves a speed, and neither a time to train nor a score",
        "`python -m bench report` compares the speed; for a time to train set model.weights=checkpoint",
    ),
    "LOG-17": (
        "the log was not written by this attempt at the trial",
        "find out who put it there; `python -m bench resume RUN` sets it aside and runs the trial again",
    ),
    "LOG-18": (
        "the log, or a file that belongs to it, was changed after it was written",
        "take the original; where there is none, run the trial again: a changed log proves nothing",
    ),
    "LOG-19": (
        "the clock that the log was written by moved, so that its times are not true",
        "let chronyd or ntpd set the nodes' clocks at boot and only slew them afterwards; then run the trial again",
    ),
    "LOG-20": (
        "the steps and evaluations do not explain how long the run took",
        "find out what the time went into, or who changed the clock or the log: a suspended machine, a file system "
        "that hung, an edited file",
    ),
    "LOG-21": (
        "the trial went on from a checkpoint, so that its log holds a part of it, and no time to train",
        "step times, speed and losses are those of the part; for a time to train run a trial that nobody interrupts",
    ),
    "REC-01": (
        "a value that the rules fix is another one",
        "set it to the value of the rules, or submit to the open division",
    ),
    "REC-02": (
        "the data does not have the rows of the rules",
        "prepare the data again, and train and evaluate on all of it",
    ),
    "REC-03": ("the submitter or the platform is not named", "set cluster.org and cluster.platform"),
    "EVL-01": (
        "evaluations do not stand where the rules have them",
        "evaluate every CEIL(384 / GBS) steps from the first one due; see CFG-03",
    ),
    "EVL-02": ("the target was reached at an evaluation that the rules do not have", "evaluate only when it is due"),
    "EVL-03": ("an evaluation does not say after how many samples", "log samples_count with every eval_accuracy"),
}

SCORE: Texts = {
    "SCO-01": ("there are not as many runs as a score takes", "run the missing trials with seeds of their own"),
    "SCO-02": (
        "more runs failed than may count as the slowest",
        "see `python -m bench why` for each; run those trials again",
    ),
    "SCO-03": ("runs share a seed", "run one of them again with another seed (seed_base)"),
    "SCO-04": ("the runs were not made alike", "score only runs of one plan together"),
    "SCO-05": (
        "the runs do not converge like the reference",
        "compare hyperparameters and data with the reference's; see RUN-06",
    ),
    "SCO-06": (
        "there are no official rules for these runs",
        "score a benchmark and batch size that the official rules know",
    ),
    "PCK-01": ("a benchmark has not as many runs as its rules want", "run the missing trials with seeds of their own"),
    "PCK-02": ("a log does not prove a valid trial", "leave that run out, or run the trial again"),
    "PCK-03": ("the task was not made to be submitted", "choose a task of the benchmark, such as task=lora70b"),
    "PCK-04": ("the runs of one benchmark were not made alike", "pack only runs of one plan together"),
    "PCK-05": ("the log names another organization", "pack with --org as logged, or set cluster.org and run again"),
}
