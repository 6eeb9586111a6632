"""Generate answers, once per rank: `python -m jobs.tasks.generate PLAN --trial K`. It writes the log."""

import csv
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract import mllog, run_files
from bench.contract.generation import Generation, GenerationRequest, Order
from bench.contract.plan import Trial
from bench.contract.plan_kinds import GenerationPlan
from jobs.data.prompts import Prompts
from jobs.engines.generation import Answer, Generator, Request, engine_of
from jobs.ranks import process_group, program, timing, transport
from jobs.ranks.identity import Rank
from jobs.ranks.telemetry import Telemetry
from jobs.ranks.watchdog import MEASURING, SAVING, Alive, Watchdog, ignore_progress
from jobs.tasks import describe, inputs

COLUMNS = ("index", "replica", "prompt_tokens", "length", "tokens", "start_s", "first_s", "done_s", "token_ids", "text")


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer of a replica. start_s: when its batch was submitted, in seconds since the replica started."""

    request: GenerationRequest
    prompt_tokens: int
    start_s: float
    answer: Answer


def main() -> None:
    with program.begun("jobs.tasks.generate", __doc__, GenerationPlan) as begun:
        run(begun.plan, begun.trial, begun.who, begun.log, begun.folder, watchdog=begun.watchdog())


def run(
    plan: GenerationPlan, trial: Trial, who: Rank, log: mllog.Writer, folder: Path, *, watchdog: Watchdog | None = None
) -> None:
    """Load the model, warm up on the first tokens of the answers, generate all answers from run_start to run_stop."""
    log.start(mllog.INIT_START)
    module, prompts = engine_of(plan), Prompts(plan, trial.seed)
    requests = {one.index: Request(prompts.tokens(one), one.length) for one in plan.requests}
    mine = {one: requests[one.index] for one in plan.requests if one.replica == who.rank // plan.world.tp}
    module.start_ranks(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    if watchdog is not None:
        watchdog.start(process_group.node_names(who))
    if who.rank == 0:  # it runs git
        describe_generation(plan, trial, dict(module.versions()), log)
    if prompts.file is not None:
        inputs.log_tokenizer(prompts.file, log)
    weights = inputs.check_weights(plan, log, who)
    generator = module.generator(plan, trial.seed)
    if plan.base_dir is not None:
        generator.load(Path(plan.base_dir))
    warm_up(plan, generator, list(mine.values()), watchdog)
    if weights is not None:
        weights.require_unchanged()
    transport.log_used(plan, who, folder, log)
    for key, value, metadata in generator.facts():
        log.event(key, value, **metadata)
    timing.settle()
    timing.forget_memory()
    process_group.gathered(who, None)
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    given = answers(plan, generator, mine, trial.seed, watchdog.alive if watchdog else ignore_progress)
    process_group.gathered(who, None)
    log.finish(mllog.SUCCESS)
    write(plan, who, given, prompts, log, folder / run_files.answers(trial.index))
    log_memory(plan, who, log)
    telemetry.log(log)
    del generator  # NCCL destroys a communicator only once no captured CUDA graph uses it
    module.end_ranks()


def warm_up(plan: GenerationPlan, generator: Generator, requests: Sequence[Request], watchdog: Watchdog | None) -> None:
    """Warm up the generator, and set the limit of the watchdog from the time that took."""
    since_s = timing.device_time_s()
    generator.warm_up(requests)
    if watchdog is not None:
        took_s, tokens = timing.device_time_s() - since_s, max(1, sum(one.length for one in requests))
        process_group.outlast(watchdog.expect_points(took_s * tokens / settings_of(plan).warmup_tokens))


def answers(
    plan: GenerationPlan, generator: Generator, mine: dict[GenerationRequest, Request], seed: int, alive: Alive
) -> list[TimedAnswer]:
    """Return this replica's answers, generated one by one or in one call."""
    requests, given = list(mine), list[TimedAnswer]()
    batches = [requests] if settings_of(plan).order is Order.side_by_side else [[one] for one in requests]
    began_s = time.perf_counter()
    for number, batch in enumerate(batches):
        alive(MEASURING, number, None)
        start_s = time.perf_counter() - began_s
        batch_answers = generator.generate([mine[one] for one in batch], seed=seed + number)
        given += [
            TimedAnswer(one, len(mine[one].prompt), start_s, answer)
            for one, answer in zip(batch, batch_answers, strict=True)
        ]
    alive(SAVING, len(requests), None)
    return given


def write(
    plan: GenerationPlan, who: Rank, given: list[TimedAnswer], prompts: Prompts, log: mllog.Writer, file: Path
) -> None:
    """Log the answers of the first rank of each replica, and attach a file with their tokens."""
    own = given if who.rank % plan.world.tp == 0 else []
    by_rank = process_group.gathered(who, own)
    every = sorted((one for of_rank in by_rank for one in of_rank), key=lambda one: one.request.index)
    if who.rank != 0:
        return
    log.event(mllog.ANSWERS, [_logged(one) for one in every])
    file.parent.mkdir(exist_ok=True)
    with file.open("x", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([COLUMNS, *(_row(one, prompts) for one in every)])
    log.attach(file)


def _logged(one: TimedAnswer) -> list[float]:
    a, request = one.answer, one.request
    times_s = (round(time_s, 6) for time_s in (one.start_s, a.first_s, a.done_s))
    return [request.index, request.replica, one.prompt_tokens, len(a.tokens), *times_s]


def _row(one: TimedAnswer, prompts: Prompts) -> list[object]:
    a, request = one.answer, one.request
    times = [f"{value:.6f}" for value in (one.start_s, a.first_s, a.done_s)]
    counts = [request.index, request.replica, one.prompt_tokens, request.length, len(a.tokens)]
    return [*counts, *times, " ".join(map(str, a.tokens)), prompts.text(a.tokens)]


def log_memory(plan: GenerationPlan, who: Rank, log: mllog.Writer) -> None:
    """Log the memory peaks of the fullest GPU, with all replicas on it, and the plan's estimate."""
    import torch

    if not torch.cuda.is_available():
        return
    sums: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank, peaks in enumerate(process_group.gathered(who, timing.peaks_gib())):
        node, local_rank = divmod(rank, plan.world.ranks_per_node)
        of_gpu = sums[node, process_group.gpu_of(plan, local_rank)]
        of_gpu[:] = [held + more for held, more in zip(of_gpu, peaks, strict=True)]
    allocated, reserved = max(sums.values())
    log.event(mllog.PEAK_MEMORY, {"allocated": allocated, "reserved": reserved, "estimated": plan.memory.total_gib})


def describe_generation(plan: GenerationPlan, trial: Trial, versions: dict[str, str], log: mllog.Writer) -> None:
    """Log the requests, the weights, the system and its software."""
    config = plan.config
    described = {
        mllog.SUBMISSION_ORG: config.cluster.org,
        mllog.SUBMISSION_PLATFORM: config.cluster.platform,
        mllog.SEED: trial.seed,
        mllog.INITIAL_WEIGHTS: mllog.RANDOM if plan.base_dir is None else "checkpoint",
        mllog.TENSOR_PARALLELISM: plan.world.tp,
        mllog.PRECISION_IN_LINEAR: {"fp32": "fp32", "fp8": "fp8"}.get(config.precision.name, "bfloat16"),
        mllog.CONFIG_FILENAME: f"task/{config.task.name}.yaml",
        **describe.system(plan),
        "software": versions,
    }
    for key, value in described.items():
        if value is not None:
            log.event(key, value)
    log.event(mllog.ANSWERS_REQUESTED, [one.length for one in plan.requests], **request_settings(plan))


def request_settings(plan: GenerationPlan) -> dict[str, object]:
    """Return the settings of the requests for the log."""
    task, cost = settings_of(plan), plan.cost
    prompts = "random" if plan.requests[0].prompt is None else "question" if task.prompts is None else "file"
    about = {
        "replicas": plan.world.dp,
        "tp": plan.world.tp,
        "order": task.order.name,
        "batching": task.batching.name,
        "max_batch": task.max_batch,
        "prompts": prompts,
        "model": plan.config.model.name,
        "weights": plan.weights.name,
        "temperature": task.sampling.temperature,
        "top_k": task.sampling.top_k,
        "top_p": task.sampling.top_p,
    }
    estimated = {} if cost is None else {"bytes_per_token": cost.bytes_per_token, "bandwidth_gbs": cost.bandwidth_gbs}
    return about | estimated


def settings_of(plan: GenerationPlan) -> Generation:
    """Return the generation settings of the task."""
    assert plan.config.task.generation is not None
    return plan.config.task.generation


if __name__ == "__main__":
    main()
