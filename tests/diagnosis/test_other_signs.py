"""`why` beyond Slurm: what Kubernetes, Ray and inference servers print, missing modules, unreadable data, Ctrl-C."""

import json
from pathlib import Path

import pytest

from bench import diagnosis
from bench.rules import RULES, signs_of_pods, signs_of_serving

LOGS = {
    "module": (
        'Traceback (most recent call last):\n  File "/work/train.py", line 3, in <module>\n'
        "ModuleNotFoundError: No module named 'flash_attn'\n",
        "RUN-25",
    ),
    "library": ("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory\n", "RUN-08"),
    "not in the image": ("ModuleNotFoundError: No module named 'megatron.core'\n", "PYX-03"),
    "image": (
        "NAME        READY   STATUS             RESTARTS   AGE\nlora-0-0   0/1     ImagePullBackOff   0          3m\n",
        "KUB-01",
    ),
    "image event": (
        'Warning  Failed  2m  kubelet  Failed to pull image "acme/lora:7": not found\n'
        "Warning  Failed  2m  kubelet  Error: ErrImagePull\n",
        "KUB-01",
    ),
    "memory of a pod": (
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
        "Warning  BackOff  1m  kubelet  Back-off restarting failed container trainer\n",
        "KUB-03",
    ),
    "evicted": (
        "Status:   Failed\nReason:   Evicted\nMessage:  The node was low on resource: memory. Threshold: 100Mi\n",
        "KUB-04",
    ),
    "evicted, in a table": ("trainer-0   0/1   Evicted   0   3m\n", "KUB-04"),
    "no node": (
        "Warning  FailedScheduling  5s  default-scheduler  0/3 nodes are available: 3 Insufficient nvidia.com/gpu.\n",
        "KUB-02",
    ),
    "volume": (
        "Warning  FailedScheduling  default-scheduler  0/1 nodes are available: pod has unbound immediate "
        "PersistentVolumeClaims\n",
        "KUB-08",
    ),
    "crash loop": ("trainer-0   0/1   CrashLoopBackOff   5   9m\n", "KUB-05"),
    "cause of a crash loop": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB\n"
        "Warning  BackOff  kubelet  Back-off restarting failed container trainer in pod lora-0\n",
        "RUN-01",
    ),
    "quota": (
        'Error creating: pods "lora-0" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8\n',
        "KUB-11",
    ),
    "secret": ('Warning  Failed  kubelet  Error: secret "hf-token" not found\n', "KUB-10"),
    "deadline": (
        "Warning  DeadlineExceeded  job-controller  Job was active longer than specified deadline\n",
        "KUB-09",
    ),
    "no operator": (
        'error: resource mapping not found for name: "lora": no matches for kind "PyTorchJob" in version '
        '"kubeflow.org/v1"\n',
        "KUB-06",
    ),
    "image that comes too slowly": (
        'Warning  Failed  kubelet  Failed to pull image "acme/lora:7": rpc error: code = DeadlineExceeded desc = '
        "context deadline exceeded\n",
        "KUB-01",
    ),
    "preempted": (
        "Normal  Preempted  default-scheduler  Preempted by pod 8f1c2d6e-0b1a-4a52-9c3f-2f8b6a1d7e90 on node dgx-1\n",
        "KUB-04",
    ),
    "preempted on the node": ("Status:  Failed\nReason:  Preempting\nMessage:  Preempted in order …\n", "KUB-04"),
    "taint": ("Normal  TaintManagerEviction  taint-eviction  Marking for deletion Pod ml/lora-0\n", "KUB-04"),
    "node gone, and its pods": (
        "Warning  NodeNotReady  node-controller  Node is not ready\n"
        "Normal  TaintManagerEviction  taint-eviction-controller  Marking for deletion Pod ml/lora-0\n",
        "KUB-13",
    ),
    "node gone": ("Warning  NodeNotReady  node-controller  Node is not ready\n", "KUB-13"),
    "permission": (
        'jobs.batch is forbidden: User "dev" cannot create resource "jobs" in the namespace "ml"\n',
        "KUB-07",
    ),
    "actor": ("ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.\n", "RAY-06"),
    "actor's node": ("ray.exceptions.ActorDiedError: The actor died because its node has died.\n", "RAY-04"),
    "actor's node, with the whole message": (
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: Node\n\tip: 10.0.0.7\nThe actor died because its node has died. Node Id: 8f1c\n"
        "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats\n",
        "RAY-04",
    ),
    "error in an actor": (
        "ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, "
        "\x1b[36mray::Node.__init__()\x1b[39m (pid=7, ip=10.0.0.7)\n"
        "ModuleNotFoundError: No module named 'flash_attn'\n",
        "RUN-25",
    ),
    "no place for the driver": (
        "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE: Job supervisor actor could not be scheduled: the node died\n",
        "RAY-03",
    ),
    "other Ray": (
        "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n",
        "RAY-02",
    ),
    "no Ray": ("ConnectionError: Failed to connect to Ray cluster at 10.0.0.7:6379\n", "RAY-01"),
    "ray memory": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n",
        "RAY-05",
    ),
    "ray waits": (
        "(autoscaler) Error: No available node types can fulfill resource request {'GPU': 8.0}. Add node types.\n",
        "RAY-03",
    ),
    "server's cache": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
        "SRV-08",
    ),
    "server's requests": (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (9.45 GiB).\n",
        "SRV-08",
    ),
    "another process": (
        "ValueError: Free memory on device cuda:0 (12.4/79.2 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.3 GiB)\n",
        "SRV-08",
    ),
    "SGLang": ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n", "SRV-08"),
    "server died": (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace above.\n",
        "SRV-03",
    ),
    "data": ("PermissionError: [Errno 13] Permission denied: '/data/c4/c4-train.00007.json.gz'\n", "CFG-06"),
    "weights": ("PermissionError: [Errno 13] Permission denied: '/models/llama/model-00001.safetensors'\n", "CFG-06"),
    "results": ("PermissionError: [Errno 13] Permission denied: '/scratch/runs/a/result_0.txt'\n", "CFG-08"),
    "results elsewhere": ("PermissionError: [Errno 13] Permission denied: '/scratch/out'\n", "CFG-08"),
    "damaged weights": (
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer\n",
        "CFG-06",
    ),
    "damaged rows": ("ValueError: mmap length is greater than file size\n", "CFG-06"),
    "damaged parquet": ("pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.\n", "CFG-06"),
    "Ctrl-C": (
        '^CTraceback (most recent call last):\n  File "/work/train.py", line 90, in <module>\nKeyboardInterrupt\n',
        "RUN-24",
    ),
    "Ctrl-C of srun": ("srun: sending Ctrl-C to StepId=7.0\nKeyboardInterrupt\n", "SLU-08"),
}
"""What was printed, and the rule that explains it."""


@pytest.mark.parametrize("name", LOGS)
def test_a_short_log_is_explained(name: str, tmp_path: Path) -> None:
    text, rule = LOGS[name]
    log = tmp_path / "job.out"
    log.write_text(f"starting 8 ranks\nepoch 0: loss 1.31\n{text}")
    explanation = diagnosis.explain([log])
    assert explanation.rule == rule and explanation.title == RULES[rule].title
    assert explanation.evidence and explanation.evidence.split(" (at ")[0].strip() in text


def test_every_sign_of_pods_and_servers_has_a_log() -> None:
    """Echoes only count with a cause: SRV-01 is in a log that another rule explains."""
    rules = {*signs_of_pods.CAUSES, *signs_of_pods.CRASHES, *signs_of_pods.DEATHS, *signs_of_serving.CAUSES}
    assert rules - {rule for _, rule in LOGS.values()} == set()


def test_a_missing_module_is_named_in_the_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank.out"
    log.write_text("ModuleNotFoundError: No module named 'triton.language'\n")
    assert "pip install triton" in str(diagnosis.explain([log]).fix)


@pytest.mark.parametrize(("files", "rule"), [((), "RUN-24"), (("job.json",), "SLU-08")])
def test_a_stopped_run_without_a_queue_is_not_slurms(files: tuple[str, ...], rule: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    status = {"outcome": "interrupted", "exit_code": 130, "rule": "SLU-08", "what": "the run was cancelled", "fix": "f"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "slurm-1.out").write_text("epoch 0\n")
    assert diagnosis.explain([tmp_path]).rule == rule


def test_a_healthy_log_has_none_of_these_signs(tmp_path: Path) -> None:
    log = tmp_path / "server.out"
    log.write_text(
        "INFO GPU KV cache size: 102,400 tokens\nINFO evicted 12 blocks\nINFO concurrency for 4,096 tokens: 25x\n"
        "Normal  Scheduled  default-scheduler  Successfully assigned ml/lora-0 to node-1\nNormal  Pulled  kubelet\n"
        "Normal  TaintManagerEviction  taint-eviction-controller  Cancelling deletion of Pod ml/lora-0\n"
    )
    assert diagnosis.explain([log]).rule == diagnosis.UNKNOWN
