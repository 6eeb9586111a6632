"""Start a server and load it, on rank 0: `python -m jobs.tasks.serve PLAN --trial K`. It writes the log."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import codec, data_files, mllog, plan_paths, run_files
from bench.contract.plan import Trial
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Device
from bench.contract.serving import Lengths, SampledLengths, Serving, lengths_of
from bench.errors import ConfigError, SubmitError
from jobs.node_checks import facts, hardware
from jobs.ranks import program
from jobs.tasks import describe, inputs

if TYPE_CHECKING:
    from jobs.serving.loadgen import LoadResult, Setting

PACKAGES = ("mlcommons-loadgen", "aiohttp", "tokenizers")
"""Packages whose versions are logged, in addition to the server's."""


def main() -> None:
    with program.begun("jobs.tasks.serve", __doc__, ServingPlan) as begun:
        if begun.who.rank == 0:  # the server is one process of its own on all of its GPUs
            begun.guard.finish = partial(_cut_short, begun)
            run(begun.plan, begun.trial, begun.log, begun.folder)


def _cut_short(begun: program.Begun[ServingPlan]) -> None:
    """Close the log, and remove the model folder that was written for this trial."""
    try:
        begun.log.abort()
    finally:
        shutil.rmtree(begun.folder / run_files.server_model(begun.trial.index), ignore_errors=True)


def run(plan: ServingPlan, trial: Trial, log: mllog.Writer, folder: Path) -> None:
    """Start the server, warm it up, load it from run_start to run_stop, and stop it."""
    serving = required(plan)
    try:
        from jobs.serving import loadgen, memory, model_folder, profile, prompts, server
    except ImportError as error:
        fix = "pip install 'runstop[serve]'"
        raise SubmitError(
            f"a serving benchmark needs {error.name}, which is not installed",
            where="jobs.serving",
            fix=fix,
            rule="RUN-08",
        ) from error
    server.allow_connections(serving.requests)
    for left in folder.glob(run_files.server_models_set_aside(trial.index)):  # as large as the model
        shutil.rmtree(left, ignore_errors=True)
    log.start(mllog.INIT_START)
    describe_serving(plan, trial, serving, log)
    weights = inputs.check_weights(plan, log, None)
    model = model_folder.prepared(plan, serving.server, folder / run_files.server_model(trial.index), seed=trial.seed)
    tokenizer = _tokenizer_folder(serving, model)
    own = prompts.tokenizer(tokenizer)
    inputs.log_tokenizer(tokenizer / data_files.TOKENIZER, log)
    is_profiled, traces = profile.is_requested(plan), (folder / run_files.server_traces(trial.index)).resolve()
    num_timed = serving.warm_up + serving.requests * len(plan.loads)
    lengths = lengths_of(serving, plan.lengths, trial.index)
    of_warm_up = (lengths.pair(number)[0] for number in range(serving.warm_up))
    tokens_in = [*of_warm_up, *lengths.tokens_in * (len(plan.loads) + is_profiled)]
    texts = prompts.random_prompts(own, lengths=tokens_in, seed=trial.seed)
    with memory.measured(plan.config) as used, ExitStack() as stack:
        stack.callback(shutil.rmtree, folder / run_files.server_model(trial.index), ignore_errors=True)
        if is_profiled:
            traces.mkdir()
            stack.callback(shutil.rmtree, traces, ignore_errors=True)
        running = server.start(
            plan,
            serving,
            model,
            folder / run_files.server_output(trial.index),
            traces=traces if is_profiled else None,
        )
        if running.child is not None:
            stack.callback(running.child.stop)
        log_server(plan, serving, running, log)
        setting = loadgen.Setting(
            serving=serving,
            server=running,
            tokenizer=own,
            lengths=lengths,
            folder=folder,
            trial=trial.index,
            seed=trial.seed,
        )
        loadgen.warm_up(setting, texts[: serving.warm_up])
        if is_profiled:
            profile.write(profile.record(plan, setting, texts[num_timed:], traces), log, folder, trial.index)
        if weights is not None:
            weights.require_unchanged()
        log.stop(mllog.INIT_STOP)
        done = timed(plan, setting, texts[serving.warm_up : num_timed], log)
    log.event(mllog.SERVER_MEMORY, used)
    for path in (path for one in done for path in one.files):
        log.attach(path)


def timed(plan: ServingPlan, setting: "Setting", texts: list[str], log: mllog.Writer) -> "list[LoadResult]":
    """Run all loads between run_start and run_stop; return their results."""
    from jobs.serving import loadgen

    done, per_load = [], setting.serving.requests
    log.start(mllog.RUN_START)
    for number, one in enumerate(plan.loads):
        print(f"{one.name}: {one.requests} requests", flush=True)
        result = loadgen.run_load(setting, one, texts[number * per_load : (number + 1) * per_load])
        write(result, log)
        done.append(result)
    log.finish(mllog.SUCCESS)
    return done


def required(plan: ServingPlan) -> Serving:
    """Return the serving settings of the task.

    Raises:
        ConfigError: the plan has none.
    """
    if plan.config.task.serving is None:
        raise ConfigError(
            "the plan has no block task.serving", where="task.serving", fix="use the plan of a task of kind serve"
        )
    return plan.config.task.serving


def _tokenizer_folder(serving: Serving, model: Path | None) -> Path:
    named = serving.server.tokenizer
    if named is not None:
        return Path(plan_paths.expanded(named) or named)
    assert model is not None  # required for a server that runs elsewhere
    return model


def describe_serving(plan: ServingPlan, trial: Trial, serving: Serving, log: mllog.Writer) -> None:
    """Log the measured system, its software and the requested loads."""
    cluster, is_elsewhere = plan.config.cluster, serving.server.url is not None
    described = {
        mllog.SUBMISSION_ORG: cluster.org,
        mllog.SUBMISSION_PLATFORM: cluster.platform,
        mllog.SEED: trial.seed,
        mllog.CONFIG_FILENAME: f"task/{plan.config.task.name}.yaml",
        mllog.TENSOR_PARALLELISM: None if is_elsewhere else plan.world.tp,
        **system(plan),
        "software": versions(() if is_elsewhere else (serving.server.name.name.replace("_", "-"),)),
    }
    for key, value in described.items():
        if value is not None:
            log.event(key, value)
    limits, names = codec.plain(serving.limits), [load.name for load in plan.loads]
    lengths = {} if plan.lengths is None else {"lengths": _distribution(serving.lengths, plan.lengths)}
    log.event(mllog.LOADS_REQUESTED, names, limits=limits, max_client_delay=serving.max_client_delay, **lengths)
    if plan.lengths is not None and plan.lengths.sha256 is not None:
        log.event(mllog.INPUT_SHA256, plan.lengths.sha256, input=mllog.REQUEST_LENGTHS)


def _distribution(lengths: Lengths, sampled: SampledLengths) -> dict[str, Any]:
    """Return what the lengths were sampled from, with the name of the file instead of its path."""
    if lengths.file is not None:
        return {"file": Path(lengths.file).name, "sha256": sampled.sha256}
    return {"prompt": codec.plain(lengths.prompt), "answer": codec.plain(lengths.answer)}


def system(plan: ServingPlan) -> dict[str, Any]:
    """Return the hardware of the server and this code's commit; torch is not needed."""
    is_elsewhere = plan.config.task.serving is not None and plan.config.task.serving.server.url is not None
    device = "cpu" if plan.config.cluster.device is Device.cpu else gpu_name()
    return {
        "num_ranks": None if is_elsewhere else plan.world.tp,
        "accelerator": None if is_elsewhere else device,
        "host_processor_model_name": hardware.cpu_model(),
        "operating_system": hardware.operating_system(),
        "commit": describe.commit(describe.ROOT, facts.IMAGE),
        **({} if is_elsewhere else describe.price(plan)),
    }


def gpu_name() -> str:
    """Return NVML's name of the first GPU."""
    try:
        import pynvml

        from jobs.serving import memory

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(memory.handles_of(pynvml, 1)[0])
    except Exception as error:  # noqa: BLE001 - the library with its error classes may not be installed
        return f"unknown GPU: {error}"
    return name.decode() if isinstance(name, bytes) else str(name)


def versions(servers: Sequence[str]) -> dict[str, str]:
    """Return the versions of the client's and the server's packages, if installed."""
    installed = {}
    for name in (*PACKAGES, *servers):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def log_server(plan: ServingPlan, serving: Serving, running: Any, log: mllog.Writer) -> None:
    """Log the server and its settings."""
    server = serving.server
    how = (
        {"url": running.url}
        if server.url is not None
        else {"argv": running.argv, "healthy_s": round(running.healthy_s, 3)}
    )
    is_random = plan.base_dir is None and server.url is None
    details = {
        "weights": "random" if is_random else "given",
        "precision": plan.config.precision.name,
        "tp": plan.world.tp,
    }
    model = plan.config.model.name if is_random else running.model
    log.event(mllog.SERVER, server.name.name, **how, model=model, **({} if server.url is not None else details))


def write(result: "LoadResult", log: mllog.Writer) -> None:
    """Log the result of a load, with the times of every request."""
    answers, load = result.answers, codec.plain(result.load)
    gaps = sum(max(0, answer.num_chunks - 1) for answer in answers)
    chunks, tokens = (sum(values) for values in zip(*((a.num_chunks, a.tokens_out or 0) for a in answers), strict=True))
    log.event(
        mllog.LOAD_MEASURED,
        load.pop("name"),
        **load,
        arrival_s=[_rounded(answer.due_s - answers[0].due_s) for answer in answers],
        latency_s=[_rounded(answer.last_s) for answer in answers],
        ttft_s=[_rounded(answer.first_s) for answer in answers],
        tpot_s=[_rounded(answer.tpot_s) for answer in answers],
        tokens_in=[answer.tokens_in for answer in answers],
        tokens_out=[answer.tokens_out for answer in answers],
        status=[answer.status for answer in answers],
        details=sorted({answer.detail for answer in answers if answer.detail})[:5],
        together=sum(answer.num_together for answer in answers) / gaps if gaps else None,
        chunks_per_token=chunks / tokens if tokens else None,
        client={name: round(value, 6) for name, value in result.client.items()},
        loadgen=result.loadgen,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


if __name__ == "__main__":
    main()
