"""Rows of the fault matrix: faults of nodes and of Slurm, and what Slurm does to a job."""

import fault_actions
from fault_matrix import ANY_FAILURE, ENDLESS, IN_LOW, PATIENT, TWO_TRIALS, UNHARMED, Answer, Fault, fails, recovers

LOST = "(requeued DUE TO NODE FAILURE|unknown: the node or the batch script was killed)"

ROWS = (
    Fault(
        name="power cut: the node of the batch script",
        inject=fault_actions.power_cut("dgx-0"),
        answer=recovers(LOST, trials=2),
        overrides=TWO_TRIALS,
        trial=1,
        alone=True,
    ),
    Fault(
        name="power cut: the other node",
        inject=fault_actions.power_cut("dgx-1"),
        answer=recovers("requeued DUE TO NODE FAILURE", trials=2),
        overrides=TWO_TRIALS,
        trial=1,
        alone=True,
    ),
    Fault(
        name="preempted",
        inject=fault_actions.preempt(),
        answer=recovers("requeued DUE TO PREEMPTION", trials=2),
        overrides=IN_LOW,
        trial=1,
        alone=True,
    ),
    Fault(
        name="preempted with a grace time",
        inject=fault_actions.preempt(grace_s=60),
        answer=recovers("SLU-10: preempted", trials=2),
        overrides=IN_LOW,
        trial=1,
        alone=True,
    ),
    Fault(
        name="preempted, then a power cut",
        inject=fault_actions.sequence(fault_actions.preempt(), fault_actions.power_cut("dgx-0")),
        answer=recovers("requeued DUE TO PREEMPTION", LOST, trials=2),
        overrides=IN_LOW,
        trial=1,
        alone=True,
    ),
    Fault(
        name="preempted, then a power cut, two attempts allowed",
        inject=fault_actions.sequence(fault_actions.preempt(), fault_actions.power_cut("dgx-1")),
        answer=Answer(
            slurm="FAILED",
            outcome="failed",
            exit_code=ANY_FAILURE,
            trials=("valid", "interrupted"),
            attempts=("interrupted: requeued DUE TO PREEMPTION", "interrupted: requeued DUE TO NODE FAILURE"),
            rule="SLU-10",
            evidence="DUE TO PREEMPTION",
        ),
        overrides=(*IN_LOW, "launch.attempts=2"),
        trial=1,
        alone=True,
    ),
    Fault(
        name="slurmctld is killed and comes back",
        inject=fault_actions.kill_daemon("slurmctld", down_s=5),
        answer=UNHARMED,
        alone=True,
    ),
    Fault(
        name="slurmdbd is killed and comes back",
        inject=fault_actions.kill_daemon("slurmdbd", down_s=5),
        answer=UNHARMED,
        alone=True,
    ),
    Fault(
        name="time limit near",
        inject=fault_actions.near_limit,
        answer=recovers("SLU-07: the time limit is near", trials=2),
        overrides=(*TWO_TRIALS, *PATIENT),
        trial=1,
    ),
    Fault(
        name="time limit too short for a trial",
        inject=fault_actions.limit_soon,
        answer=fails("SLU-07", "the time limit is near"),
        overrides=ENDLESS,
    ),
    Fault(
        name="trial longer than its walltime",
        inject=lambda scene: None,
        answer=fails("SLU-07", "DUE TO TIME LIMIT"),
        overrides=(*ENDLESS, "walltime=1"),
    ),
    Fault(
        name="requeued by an admin",
        inject=fault_actions.admin("scontrol", "requeue"),
        answer=recovers("requeued", trials=2),
        overrides=TWO_TRIALS,
        trial=1,
    ),
    Fault(
        name="cancelled",
        inject=fault_actions.admin("scancel"),
        answer=Answer(
            slurm="CANCELLED",
            outcome="interrupted",
            exit_code=143,
            trials=("valid", "running"),
            attempts=("running",),
            rule="SLU-08",
            evidence="CANCELLED AT",
        ),
        overrides=TWO_TRIALS,
        trial=1,
    ),
    Fault(name="suspended and resumed", inject=fault_actions.suspend, answer=UNHARMED),
)
