"""NVIDIA's llama2_70b_lora as a preset: the script that starts it, and a stub of its entry point judged and scored."""

import shlex
import stat

import pytest
from user import User

from bench.backends.slurm import script
from bench.planning import compose
from helpers import answers

WORDS = ("task=lora70b", "engine=command", "cluster.org=here")
STUB = r"""
set -eu
cd "$(dirname "$0")"
[[ $PWD == */ft-llm && $DGXNNODES == 2 && $DGXNGPU == 1 && $TP == 1 && $MINIBS == 4 && $LR == 0.0004 && $FP8 == True ]]
[[ $LOCAL_WORLD_SIZE == 1 && $WORLD_SIZE == 2 && -n $MASTER_ADDR && -n $MASTER_PORT && $RANK == "$SLURM_PROCID" ]]
((RANK == 0)) || exit 0
say() { # TYPE KEY VALUE [METADATA]: a record as mlperf-common prints it
  printf ':::MLLOG {"namespace": "", "time_ms": %s, "event_type": "%s", "key": "%s", "value": %s, ' \
    "$(date +%s%3N)" "$1" "$2" "$3"
  printf '"metadata": {"file": "/workspace/ft-llm/custom_callbacks.py", "lineno": 1%s}}\n' "${4:+, $4}"
}
point() { say POINT_IN_TIME "$@"; }
say INTERVAL_START init_start null
point submission_benchmark '"llama2_70b_lora"'
point seed "$SEED"
point global_batch_size 8
point train_samples 3901
point eval_samples 173
point opt_learning_rate_warmup_factor 0.0
point opt_adamw_weight_decay 0.0001
point opt_gradient_clip_norm 0.3
point gradient_accumulation_steps "$MINIBS"
point opt_learning_rate_training_steps "$MAX_STEPS"
point opt_base_learning_rate "$LR"
point lora_rank 16
point lora_alpha 32
echo "0: a line of something else"
say INTERVAL_END init_stop null
say INTERVAL_START run_start null
say INTERVAL_START block_start null '"samples_count": 0'
for samples in 80 160 240 1520; do
  point train_loss 1.3589 "\"samples_count\": $samples, \"lr\": 0.0004"
  sleep 0.05
done
losses=(0.9457 0.9392 0.9301 0.9267 0.9241)
for place in 0 1 2 3 4; do
  samples=$((1536 + 384 * place))
  point tracked_stats '{"throughput": 2.5556}' "\"step\": $samples"
  say INTERVAL_END block_stop null "\"samples_count\": $samples"
  say INTERVAL_START eval_start null "\"samples_count\": $samples"
  point eval_accuracy "${losses[place]}" "\"samples_count\": $samples"
  say INTERVAL_END eval_stop null "\"samples_count\": $samples"
  ((place == 4)) || say INTERVAL_START block_start null "\"samples_count\": $samples"
done
say INTERVAL_END run_stop 0.9241 '"samples_count": 3072, "status": "success"'
"""


@pytest.mark.long
@pytest.mark.parametrize("preset", ["nvidia_v5_0", "nvidia_v5_1"])
@pytest.mark.parametrize(
    ("place", "nodes", "minibs"), [("dgx1", 1, 4), ("dgx2", 2, 2), ("dgxh200", 1, 2), ("dgxh200", 2, 1)]
)
def test_the_script_contains_every_step_of_running_it_by_hand(preset: str, place: str, nodes: int, minibs: int) -> None:
    words = (*WORDS, f"engine.preset={preset}", f"cluster={place}", f"cluster.num_nodes={nodes}")
    plan = compose.compose(words)
    text = script.script(plan)
    steps = (
        *(
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=8",
            "#SBATCH --gpus-per-node=8",
            "#SBATCH --exclusive",
        ),
        *("#SBATCH --mem=0", "#SBATCH --time=70"),
        *('"${CONT:?is not set', '"${DATADIR:?is not set', '"${MODEL:?is not set', '"${LOGDIR:?is not set'),
        '--container-image="$CONT"',
        "$DATADIR:/data:ro,$MODEL:/ckpt:ro,$LOGDIR:/results",
        *("--no-container-mount-home", "--container-writable", "--mpi=pmix"),
        "drop_command=(sudo -n /sbin/sysctl vm.drop_caches=3)",
        'argv_node_check=("$python" -m jobs.node_checks.health plan.json)',  # the all-reduce of all GPUs
        'argv_trial_0=("$python" -m jobs.command.run plan.json --trial 0)',
    )
    assert [step for step in steps if step not in text] == []
    program = plan.config.program
    assert program is not None and shlex.join(program.argv) == "slurm2pytorch ./run_and_time.sh"
    assert program.folder == "/workspace/ft-llm" and "not run here" in (program.note or "")
    batch, world = plan.batch, plan.world
    assert batch.gradient_accumulation_steps == minibs
    assert minibs * world.num_ranks // (world.tp * world.pp * world.cp) == batch.global_batch_size == 8


@pytest.mark.slurm
def test_a_stub_of_its_entry_point_is_judged_and_scored(user: User) -> None:
    folder = user.home / "ft-llm"
    folder.mkdir()
    for name, text in {"slurm2pytorch": 'exec "$@"', "run_and_time.sh": STUB}.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    run = user.launch(
        *(*WORDS, "engine.preset=nvidia_v5_0", "cluster=dgx2", "container=none", "cluster.device=cpu", "trials=10"),
        *("cluster.ranks_per_node=1", "parallel.tp=1", "launch.health=false", "cluster.drop_caches=/bin/true"),
        *("cluster.slurm={partition: batch, exclusive: false, gpu_request: none, mpi: none}", "walltime=1"),
        *(f"engine.command.folder={folder}", f"++engine.command.environment.PATH='{folder}:{user.env['PATH']}'"),
    )
    user.end(run, "COMPLETED")
    assert run.outcomes == ["valid"] * 10, run.output()
    scored = answers.one(user.types("score", run.folder, "--ruleset", "5.0.0", "--json", code=None).stdout)
    assert [verdict["passed"] for verdict in scored["compliance"]] == [True] * 10
    assert scored["rcp"]["passed"] is True and scored["num_failed"] == 0 and scored["olympic_samples"] == 3072
