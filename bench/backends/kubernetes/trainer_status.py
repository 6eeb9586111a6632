"""Tell Kubeflow Trainer how far a run is; it keeps that in `status.trainerStatus` of the run's TrainJob.

With its feature gate TrainJobStatus (2.3) the Trainer tells the pods of a TrainJob in their environment where to post
this, with which certificate and token. Nobody else has such a place, and elsewhere nothing is posted. What is not
known is left out, and a run never waits for it. Source: kubeflow/trainer, pkg/statusserver and
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

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{word}" for word in ("URL", "CA_CERT", "TOKEN"))
"""Variables of a TrainJob's pods: an address, and two paths. The token is renewed, so it is read for every post."""
EVERY_S, TIMEOUT_S = 15.0, 5.0
METRICS = {mllog.TRAIN_LOSS: "train_loss", mllog.EVAL_ACCURACY: "eval_loss"}
"""Records of a log, and what users of a TrainJob call them."""


@dataclass(slots=True)
class FollowedTrial:
    """What one trial's log says so far."""

    log: Follower
    metrics: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0
    is_over: bool = False
    training_s: float = 0.0
    """From run_start to the latest record that counts samples."""
    _start_ms: int = 0

    def read(self) -> None:
        """Take what the log has got since; a log that begins anew is another attempt's."""
        restarts = self.log.restarts
        events = self.log.poll()
        if self.log.restarts != restarts:
            self.metrics, self.samples, self.is_over = {}, 0.0, False
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
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
    """Reads the logs of a run's trials while they are written."""

    plan: Plan
    trials: Sequence[FollowedTrial]

    @property
    def max_samples(self) -> int | None:
        """How many samples a trial trains on at most."""
        return self.plan.max_samples

    def read(self) -> dict[str, Any]:
        """Return how far the run is, as upstream's TrainerStatus. The percentage is of the most that it may take."""
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
        """Return the time that the rest takes at the latest trial's pace; None where a target may end it earlier."""
        most, training = self.max_samples, self.plan.config.task.training
        if most is None or not latest.training_s:
            return None
        if training is not None and training.target_eval_loss is not None:
            return None
        left = sum(most - trial.samples for trial in self.trials if not trial.is_over)
        return left * latest.training_s / latest.samples if latest.samples else None


@contextmanager
def told(run: Path, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Tell how far a run is for as long as the block takes, and once more at its end."""
    if not (URL in env and CERTIFICATE in env and TOKEN in env):
        yield
        return
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(run, env, ended), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(2 * TIMEOUT_S)


def _tell(run: Path, env: Mapping[str, str], ended: threading.Event) -> None:
    reader, said = None, ""
    while True:
        is_last = ended.wait(EVERY_S)
        reader = reader or _reader(run)
        failure = "" if reader is None else _posted(reader, env)
        if failure and failure != said:
            print(f"the TrainJob's status does not get the progress: {failure}", flush=True)
        said = failure
        if is_last:
            return


def _reader(run: Path) -> FollowedRun | None:
    """Return who reads a run's logs, once it has its plan."""
    try:
        plan = plan_kinds.load(run / PLAN)
    except BenchError:
        return None
    return (
        FollowedRun(plan, [FollowedTrial(Follower(run / trial.log)) for trial in plan.trials]) if plan.trials else None
    )


def _posted(reader: FollowedRun, env: Mapping[str, str]) -> str:
    """Post how far a run is; return why that failed, or nothing."""
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
