"""Post a run's progress to Kubeflow Trainer, which stores it in `status.trainerStatus` of the TrainJob.

With the feature gate TrainJobStatus (2.3) the Trainer sets the URL, the certificate and the token of its status server
in the environment of a TrainJob's pods. Without these variables nothing is posted. Unknown values are left out, and
the run never waits for the server. Source: kubeflow/trainer, pkg/statusserver and
docs/proposals/2779-trainjob-progress.
"""

import json
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from bench.contract import mllog, plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.errors import BenchError
from bench.mlperf.reader import Event, Follower, is_number

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Environment variables of a TrainJob's pods: a URL and two paths. The token is renewed, so every post reads it."""
EVERY_S, TIMEOUT_S = 15.0, 5.0
METRICS = {mllog.TRAIN_LOSS: "train_loss", mllog.EVAL_ACCURACY: "eval_loss"}
"""MLLOG keys, and the metric names in a TrainJob's status."""


@dataclass(slots=True)
class FollowedTrial:
    """The progress of one trial, from its log so far."""

    log: Follower
    metrics: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0
    is_over: bool = False
    training_s: float = 0.0
    """From run_start to the latest record that counts samples."""
    _start_ms: int = 0

    def read(self) -> None:
        """Read new records; if the log was restarted, it belongs to another attempt and the metrics are reset."""
        restarts = self.log.restarts
        events = self.log.poll()
        if self.log.restarts != restarts:
            self.metrics, self.samples, self.is_over = {}, 0.0, False
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        counted = event.metadata.get("samples_count")
        if event.key == mllog.RUN_START:
            self._start_ms, self.is_over = event.time_ms, False
        elif event.key == mllog.RUN_STOP:
            self.is_over = True
        elif event.key in METRICS:
            if is_number(event.value):
                self.metrics[METRICS[event.key]] = float(event.value)
            if is_number(counted):
                self.samples, self.training_s = float(counted), (event.time_ms - self._start_ms) / 1000


@dataclass(slots=True)
class FollowedRun:
    """Follows the logs of a run's trials while they are written."""

    plan: Plan
    trials: Sequence[FollowedTrial]

    @property
    def max_samples(self) -> int | None:
        """The most samples that one trial trains on."""
        return self.plan.max_samples

    def read(self) -> dict[str, Any]:
        """Return the progress as a TrainerStatus. The percentage is relative to `max_samples`, the most possible."""
        for trial in self.trials:
            trial.read()
        done = sum(self._share(trial) for trial in self.trials) / len(self.trials)
        begun = [number for number, trial in enumerate(self.trials) if trial.metrics or trial.is_over]
        latest = self.trials[begun[-1]] if begun else None
        metrics = {} if latest is None else {**latest.metrics, "trial": begun[-1], "samples_count": latest.samples}
        status: dict[str, Any] = {"progressPercentage": int(100 * done), "lastUpdatedTime": _now()}
        status["metrics"] = [{"name": name, "value": f"{value:.10g}"} for name, value in metrics.items()]
        left_s = None if latest is None else self._left_s(latest)
        return status if left_s is None else status | {"estimatedRemainingSeconds": int(left_s)}

    def _share(self, trial: FollowedTrial) -> float:
        return 1.0 if trial.is_over else min(1.0, trial.samples / self.max_samples) if self.max_samples else 0.0

    def _left_s(self, latest: FollowedTrial) -> float | None:
        """Return the remaining time at the latest trial's speed; None if a target loss may end training earlier."""
        most, training = self.max_samples, self.plan.config.task.training
        if most is None or not latest.training_s:
            return None
        if training is not None and training.target_eval_loss is not None:
            return None
        left = sum(most - trial.samples for trial in self.trials if not trial.is_over)
        return left * latest.training_s / latest.samples if latest.samples else None


@contextmanager
def posting(run: Path, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Post a run's progress in a thread while the block runs, and once more at its end."""
    if not (URL in env and CERTIFICATE in env and TOKEN in env):
        yield
        return
    ended = threading.Event()
    poster = threading.Thread(target=_post_all, args=(run, env, ended), daemon=True)
    poster.start()
    try:
        yield
    finally:
        ended.set()
        poster.join(2 * TIMEOUT_S)


def _post_all(run: Path, env: Mapping[str, str], ended: threading.Event) -> None:
    reader, last_failure = None, ""
    while True:
        is_last = ended.wait(EVERY_S)
        reader = reader or _reader(run)
        failure = "" if reader is None else _post(reader, env)
        if failure and failure != last_failure:
            print(f"cannot post the progress to the TrainJob's status: {failure}", flush=True)
        last_failure = failure
        if is_last:
            return


def _reader(run: Path) -> FollowedRun | None:
    """Return a reader of the run's logs; None while the run has no plan or the plan has no trials."""
    try:
        plan = plan_kinds.load(run / PLAN)
    except BenchError:
        return None
    return (
        FollowedRun(plan, [FollowedTrial(Follower(run / trial.log)) for trial in plan.trials]) if plan.trials else None
    )


def _post(reader: FollowedRun, env: Mapping[str, str]) -> str:
    """Post the progress once; return the error, or an empty string."""
    try:
        token = Path(env[TOKEN]).read_text().strip()
        body = json.dumps({"trainerStatus": reader.read()}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = Request(env[URL], data=body, headers=headers, method="POST")
        https = HTTPSHandler(context=ssl.create_default_context(cafile=env[CERTIFICATE]))
        with build_opener(ProxyHandler({}), https).open(request, timeout=TIMEOUT_S) as answer:
            answer.read()
    except (OSError, HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
