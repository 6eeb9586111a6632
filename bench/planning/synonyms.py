"""What users of other tools write instead of our keys, choices, values and verbs, for suggestions in messages."""

KEYS = {
    **dict.fromkeys(("lr", "learning_rate", "base_lr", "max_lr", "peak_lr", "learningrate"), "recipe.lr"),
    **dict.fromkeys(
        ("batch_size", "batch", "bs", "gbs", "global_batch", "train_batch_size", "batchsize", "minibatch_size"),
        "recipe.global_batch_size",
    ),
    **dict.fromkeys(
        ("micro_batch", "mbs", "per_device_train_batch_size", "per_device_batch_size", "device_batch_size"),
        "recipe.micro_batch_size",
    ),
    **dict.fromkeys(
        ("warmup", "warmup_steps", "num_warmup_steps", "lr_warmup", "warmup_iters"), "recipe.lr_warmup_steps"
    ),
    **dict.fromkeys(("wd", "weight_decay"), "recipe.weight_decay"),
    **dict.fromkeys(("clip", "grad_clip", "gradient_clipping", "max_grad_norm", "clip_norm"), "recipe.clip_grad"),
    **dict.fromkeys(("beta1",), "recipe.adam_beta1"),
    **dict.fromkeys(("beta2",), "recipe.adam_beta2"),
    **dict.fromkeys(("eval_interval", "eval_every", "val_check_interval"), "recipe.eval_every_samples"),
    **dict.fromkeys(
        ("tp", "tensor", "tensor_parallel", "tensor_parallel_size", "tp_size", "tensor_model_parallel_size"),
        "parallel.tp",
    ),
    **dict.fromkeys(
        ("pp", "pipeline", "pipeline_parallel", "pipeline_parallel_size", "pp_size", "pipeline_model_parallel_size"),
        "parallel.pp",
    ),
    **dict.fromkeys(("cp", "context_parallel", "context_parallel_size", "cp_size"), "parallel.cp"),
    **dict.fromkeys(("ep", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size"), "parallel.ep"),
    **dict.fromkeys(("sp", "sequence_parallel"), "parallel.sp"),
    **dict.fromkeys(
        (
            "gpus",
            "num_gpus",
            "ngpus",
            "n_gpus",
            "gpus_per_node",
            "nproc_per_node",
            "nproc",
            "devices",
            "ranks",
            "world_size",
        ),
        "cluster.ranks_per_node",
    ),
    **dict.fromkeys(("nodes", "nnodes", "num_nodes", "n_nodes", "hosts_count"), "cluster.num_nodes"),
    **dict.fromkeys(("device", "accelerator"), "cluster.device"),
    **dict.fromkeys(("partition", "queue"), "cluster.slurm.partition"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "epoch"), "task.training.epochs"),
    **dict.fromkeys(
        ("steps", "max_steps", "train_steps", "train_iters", "num_steps", "iterations", "iters"),
        "task.training.max_steps",
    ),
    **dict.fromkeys(("target", "target_loss", "target_accuracy", "eval_loss"), "task.training.target_eval_loss"),
    **dict.fromkeys(("lora", "lora_rank", "lora_r", "r", "rank"), "task.training.lora.rank"),
    **dict.fromkeys(("lora_alpha", "alpha"), "task.training.lora.alpha"),
    **dict.fromkeys(("lora_dropout", "dropout"), "task.training.lora.dropout"),
    **dict.fromkeys(
        ("save_steps", "save_interval", "checkpoint_every", "save_every"), "task.training.checkpoint_every_steps"
    ),
    **dict.fromkeys(
        (
            "seq_len",
            "seq_length",
            "seqlen",
            "sequence_length",
            "max_seq_length",
            "max_seq_len",
            "max_length",
            "context_length",
            "block_size",
        ),
        "data.seq_length",
    ),
    **dict.fromkeys(("data_path", "train_file", "data_files", "train_files"), "data.files"),
    **dict.fromkeys(("tokenizer", "tokenizer_path"), "data.tokenizer"),
    **dict.fromkeys(("seed", "random_seed"), "seed_base"),
    **dict.fromkeys(("dtype", "torch_dtype", "data_type"), "precision"),
    **dict.fromkeys(("weights",), "model.weights"),
    **dict.fromkeys(
        (
            "output_dir",
            "output",
            "out",
            "out_dir",
            "save_dir",
            "log_dir",
            "logdir",
            "run_dir",
            "folder",
            "hydra.run.dir",
            "hydra.sweep.dir",
        ),
        "launch.folder",
    ),
    **dict.fromkeys(("dryrun", "dry_run"), "launch.dry_run"),
    **dict.fromkeys(("retries", "max_retries"), "launch.attempts"),
    **dict.fromkeys(("tracker", "trackers", "report_to", "logger"), "launch.trackers"),
    **dict.fromkeys(("profiler", "profile"), "launch.profile"),
    **dict.fromkeys(("time", "time_limit", "timelimit", "timeout", "wall_time"), "walltime"),
    **dict.fromkeys(("runs", "num_trials", "repeats", "n_runs", "trial"), "trials"),
    **dict.fromkeys(("image", "container_image", "docker_image"), "container.image"),
    **dict.fromkeys(("mounts", "volumes"), "container.mounts"),
    **dict.fromkeys(("env", "environment"), "cluster.environment"),
    **dict.fromkeys(("model_path", "model_name_or_path", "checkpoint"), "cluster.paths.model"),
    **dict.fromkeys(("request_rate", "rate"), "task.serving.rates"),
}
"""Names of settings in other tools, and our keys; a key of ours whose last part is the name needs no entry."""

EXPLAINED = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "accumulate_grad_batches"),
        "gradient accumulation follows from recipe.global_batch_size, recipe.micro_batch_size and the number of ranks",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "recompute"),
        "set recipe.recompute=full, fit or none",
    ),
    **dict.fromkeys(("optimizer", "optim"), "the optimizer is AdamW; its settings are in recipe (recipe.adam_beta1)"),
    **dict.fromkeys(("lr_scheduler", "scheduler", "lr_schedule"), "the learning rate decays by a cosine to 0"),
    **dict.fromkeys(("account",), "export SBATCH_ACCOUNT=…, or set cluster.slurm.arguments='[\"--account=…\"]'"),
}
"""Settings of other tools that have no single key here, and what to do instead."""

GROUPS = {
    **dict.fromkeys(("gpu", "gpu_type", "cluster.gpu", "gpu_name"), "gpu@cluster.gpu"),
    **dict.fromkeys(("dataset",), "data"),
    **dict.fromkeys(("backend", "system", "site", "machine"), "cluster"),
    **dict.fromkeys(("framework",), "engine"),
    **dict.fromkeys(("benchmark", "workload"), "task"),
    **dict.fromkeys(("model_name",), "model"),
}
"""Other names of config groups."""

CHOICES = {
    "cluster": {
        **dict.fromkeys(("k8s", "kube"), "kubernetes"),
        **dict.fromkeys(("laptop", "localhost", "here", "cpu", "pc", "single"), "local"),
        "ssh": "hosts",
        "raycluster": "ray",
    },
    "engine": {
        **dict.fromkeys(("pytorch", "torch", "mcore", "megatron_core", "megatron-core", "megatron-lm"), "megatron"),
        **dict.fromkeys(("hf", "transformers", "trl", "accelerate", "deepspeed", "fsdp", "peft"), "huggingface"),
        **dict.fromkeys(("custom", "own", "program", "script"), "command"),
    },
    "container": {"enroot": "pyxis", "sqsh": "pyxis", "singularity": "apptainer"},
    "server": {"hf": "transformers", "trt": "tensorrt_llm", "trtllm": "tensorrt_llm", "tensorrt": "tensorrt_llm"},
}
"""By config group: other names of its choices."""

CHOICE_FIXES = {
    "cluster": {
        "slurm": "choose a cluster with Slurm, such as dgx1, dgx2 or dgx8; for your own cluster, copy the most similar "
        "file (docs/first-day.md)",
        "pbs": "runstop starts jobs on Slurm, Kubernetes and Ray, and runs on hosts over ssh",
        "lsf": "runstop starts jobs on Slurm, Kubernetes and Ray, and runs on hosts over ssh",
        "dgxh100": "choose dgx1, dgx2 or dgx8: 1, 2 or 8 nodes with 8 H100 each",
    },
    "engine": dict.fromkeys(
        ("torchtitan", "axolotl", "llamafactory", "nanogpt"),
        "for a training program of your own: task=my_program engine=command (docs/your-program.md)",
    ),
    "model": {"": "for another model from Hugging Face: model=hf, with its folder in MODEL (docs/your-model.md)"},
    "gpu": {"": "for another GPU: runstop calibrate writes its file (docs/your-gpu.md)"},
    "data": {"": "for files of your own: data=text data.files=… (docs/your-data.md)"},
}
"""By config group: what to do instead of a choice that does not exist; "" is for every choice."""

VALUES = {
    "precision": {
        **dict.fromkeys(("fp16", "float16", "half", "bfloat16", "16", "bf16-mixed"), "bf16"),
        **dict.fromkeys(("float32", "float", "full", "32", "tf32"), "fp32"),
        **dict.fromkeys(("float8", "e4m3", "8"), "fp8"),
    },
    "cluster.device": dict.fromkeys(("gpu", "nvidia", "rocm", "hip"), "cuda"),
    "task.training.trains": dict.fromkeys(("full", "everything", "sft"), "all"),
    "cluster.backend": {"k8s": "kubernetes", "here": "local"},
    "recipe.recompute": dict.fromkeys(("selective", "true", "auto"), "fit"),
}
"""By key: other words for its values."""

VALUE_FIXES = {
    "precision": {
        **dict.fromkeys(
            ("nf4", "fp4", "int4", "4bit", "qlora"),
            "for weights in 4 bits choose a task that has them, such as task=qlora_7b, or set "
            "task.generation.nf4=true in a task generate_*",
        ),
        **dict.fromkeys(("int8", "8bit"), "for 8 bits write precision=fp8 (whole numbers of 8 bits are not supported)"),
    },
    "cluster.backend": dict.fromkeys(
        ("pbs", "lsf", "sge", "torque", "flux"),
        "this queue is not supported; on hosts that ssh reaches: cluster=hosts, on one node of a job: cluster=local",
    ),
    "container.runtime": {
        "singularity": "write container=apptainer, the new name of Singularity",
        "enroot": "write container=pyxis, which starts Enroot under Slurm",
    },
}
"""By key: what to do instead of a value that has no counterpart among ours."""

VERBS = {
    **dict.fromkeys(("run", "start", "train", "submit", "benchmark", "exec", "go"), "launch"),
    **dict.fromkeys(("status", "list", "ls", "ps", "queue", "jobs", "show"), "runs"),
    **dict.fromkeys(("kill", "stop", "abort"), "cancel"),
    **dict.fromkeys(("check", "preflight", "validate", "test", "lint"), "doctor"),
    **dict.fromkeys(("dryrun", "dry-run", "estimate"), "plan"),
    **dict.fromkeys(("explain", "diagnose", "debug", "error"), "why"),
    **dict.fromkeys(("diff", "cmp"), "compare"),
    **dict.fromkeys(("download", "pull"), "fetch"),
    **dict.fromkeys(("log", "tail", "cat", "output"), "logs"),
    **dict.fromkeys(("restart", "continue"), "resume"),
    **dict.fromkeys(("script", "sbatch"), "render"),
    **dict.fromkeys(("delete", "remove", "clean"), "rm"),
    **dict.fromkeys(("help",), "--help"),
    **dict.fromkeys(("version",), "--version"),
}
"""Verbs of other tools, and ours."""

ACTIONS = {
    **dict.fromkeys(("pull", "get", "add", "download"), "import"),
    **dict.fromkeys(("ls", "show"), "list"),
    "check": "verify",
    **dict.fromkeys(("dataset", "datasets"), "data"),
}
"""Other names of the actions of our verbs."""

PROBLEMS = {
    "oom": "out of memory",
    "enospc": "disk is full",
    "disk full": "disk is full",
    "timeout": "time limit",
    "segfault": "crash",
    "nan": "not finite",
    "hang": "hang",
    "killed": "killed",
}
"""Short names of problems, and the words of our rules."""
