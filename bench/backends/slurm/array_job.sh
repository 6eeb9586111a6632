# ---- Each task of this array puts the script of its run together, which is self-contained, and runs it. ----

set -euo pipefail
umask go-w

run_script() { "before_$task" && common && "after_$task"; }

refuse() { # WHAT
  echo "$1" >&2
  exit 2
}

task=$SLURM_ARRAY_TASK_ID
below=$(dirname -- "${1:?sbatch FILE FOLDER: the runs are written next to FOLDER}")
run=$below/${runs[$task]}
if (umask go-w && mkdir -p -- "$below" && mkdir -- "$run") 2>/dev/null; then
  run_script >"$run/.part" && mv -- "$run/.part" "$run/$script_file"
else # submitted by runstop, or started again
  run_script | cmp -s - "$run/$script_file" || refuse "CFG-05: $run has no $script_file of this array"
fi
export SLURM_ARRAY_JOB_ID=${SLURM_ARRAY_JOB_ID}_$task # to its script, this run is the whole job, by the task's id
unset SLURM_ARRAY_TASK_ID
exec bash "$run/$script_file" "$run"
