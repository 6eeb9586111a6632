"""Rows of the fault matrix: what happens to nodes and to Slurm, and what Slurm does to a job."""

import inflict
from matrix import ANY_FAILURE, ENDLESS, IN_LOW, PATIENT, TWO_TRIALS, UNHARMED, Answer, Fault, fails, recovers

LOST = "(requeued DUE TO NODE FAILURE|lost without a word)"

ROWS = (
    Fault(
        name="power cut: the node of the batch script",
        inflict=inflict.power_cut("dgx-0"),
        answer=recovers(LOST),
        alone=True,
    ),
    Fault(
        name="power cut: the other node",
        inflict=inflict.power_cut("dgx-1"),
        answer=recovers("requeued DUE TO NODE FAILURE"),
        alone=True,
    ),
    Fault(
        name="preempted",
        inflict=inflict.preempt(),
        answer=recovers("requeued DUE TO PREEMPTION"),
        overrides=IN_LOW,
        alone=True,
    ),
    Fault(
        name="preempted with a grace time",
        inflict=inflict.preempt(grace_s=60),
        answer=recovers("SLU-10: preempted"),
        overrides=IN_LOW,
        alone=True,
    ),
    Fault(
        name="preempted, then a power cut",
        inflict=inflict.one_after_the_other(inflict.preempt(), inflict.power_cut("dgx-0")),
        answer=recovers("requeued DUE TO PREEMPTION", LOST),
        overrides=IN_LOW,
        alone=True,
    ),
    Fault(
        name="preempted, then a power cut, of two attempts",
        inflict=inflict.one_after_the_other(inflict.preempt(), inflict.power_cut("dgx-1")),
        answer=Answer(
            slurm="FAILED",
            outcome="failed",
            exit_code=ANY_FAILURE,
            trials=("proven", "interrupted"),
            attempts=("interrupted: requeued DUE TO PREEMPTION", "interrupted: requeued DUE TO NODE FAILURE"),
            rule="SLU-10",
            evidence="DUE TO PREEMPTION",
        ),
        overrides=(*IN_LOW, "launch.attempts=2"),
        alone=True,
    ),
    Fault(
        name="slurmctld is killed and comes back",
        inflict=inflict.kill_daemon("slurmctld", down_s=5),
        answer=UNHARMED,
        alone=True,
    ),
    Fault(
        name="slurmdbd is killed and comes back",
        inflict=inflict.kill_daemon("slurmdbd", down_s=5),
        answer=UNHARMED,
        alone=True,
    ),
    Fault(
        name="time limit near",
        inflict=inflict.near_limit,
        answer=recovers("SLU-07: the time limit is near"),
        overrides=(*TWO_TRIALS, *PATIENT),
    ),
    Fault(
        name="time limit too short for a trial",
        inflict=inflict.limit_min(2),
        answer=fails("SLU-07", "the time limit is near", trials=("aborted",)),
        overrides=ENDLESS,
        trial=0,
        only_the_script_knows=True,
    ),
    Fault(
        name="walltime of a trial",
        inflict=lambda scene: None,
        answer=fails("SLU-07", "DUE TO TIME LIMIT", trials=("aborted",)),
        overrides=(*ENDLESS, "walltime=1"),
        trial=0,
    ),
    Fault(name="requeued by an admin", inflict=inflict.admin("scontrol", "requeue"), answer=recovers("requeued")),
    Fault(
        name="cancelled",
        inflict=inflict.admin("scancel"),
        answer=Answer(
            slurm="CANCELLED",
            outcome="interrupted",
            exit_code=143,
            trials=("proven", "running"),
            attempts=("running",),
            rule="SLU-08",
            evidence="CANCELLED AT",
        ),
    ),
    Fault(name="suspended and resumed", inflict=inflict.suspend, answer=UNHARMED),
)
