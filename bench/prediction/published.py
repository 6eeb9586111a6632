"""Read the published rows, and the models, rates and links with which they are predicted."""

import csv
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from bench.contract import codec
from bench.contract.model import Model
from bench.contract.network import Network
from bench.contract.schema import Rates
from bench.planning.conf_folder import CONF
from bench.prediction.step import AttentionOfKind, Layout

DATA = files("bench.prediction") / "data"
TOKENS = {"gpt3": 2048, "llama31_405b": 8192, "llama2_70b_lora": 8192}
"""Tokens of a sample. Source: MLPerf's training rules."""
MODELS = {"gpt3": "gpt3_175b", "llama31_405b": "llama31_405b", "llama2_70b_lora": "llama2_70b"}
ADAPTER_WEIGHTS = {"llama2_70b_lora": 44_564_480}
"""Rank 16 on qkv and proj (bench/planning/estimates/parameters.py)."""
PREDICTED_GPUS = ("h100", "h200", "b200", "gb200", "b300", "gb300")
CALIBRATED_GPUS = ("h100", "h200", "b200", "gb200")
"""GPUs with a published step on one node in v4.0 to v5.0, from which a constant is."""
SEEN = "v5.1"
"""A round that was open to the authors of this model before it was finished. No constant is from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published system."""

    round: str
    benchmark: str
    submitter: str
    system: str
    gpu: str
    num_gpus: int
    gpus_per_node: int
    global_batch_size: int
    layout: Layout | None
    """None: not published, or of other software."""
    layout_source: str
    precision: str
    step_s: float | None
    """None: the log has no step time and no throughput."""

    @property
    def name(self) -> str:
        return f"{self.round} {self.submitter} {self.system}"

    @property
    def is_one_node(self) -> bool:
        return self.num_gpus <= self.gpus_per_node

    @property
    def is_lora(self) -> bool:
        return self.benchmark in ADAPTER_WEIGHTS

    @property
    def is_seen(self) -> bool:
        return self.round == SEEN


@cache
def rows() -> tuple[Row, ...]:
    """Return all published rows, in the order of the table."""
    return tuple(_row(each) for each in table("published_steps.csv"))


def table(name: str) -> list[dict[str, str]]:
    """Return the lines of a table of `data/`, without its comments."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _row(text: dict[str, str]) -> Row:
    num_gpus, batch = int(text["num_gpus"]), int(text["global_batch_size"])
    layout = None
    if text["tp"]:
        tp, pp, cp = int(text["tp"]), int(text["pp"]), int(text["cp"])
        layout = Layout(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=num_gpus // (tp * pp * cp),
            vpp=int(text["vpp"]),
            micro_batch_size=int(text["micro_batch_size"]),
            global_batch_size=batch,
            seq_length=TOKENS[text["benchmark"]],
            balances_ends=text["balances_ends"] == "1",
            graphs=text["graphs"] == "1",
        )
    return Row(
        round=text["round"],
        benchmark=text["benchmark"],
        submitter=text["submitter"],
        system=text["system"],
        gpu=text["gpu"],
        num_gpus=num_gpus,
        gpus_per_node=int(text["gpus_per_node"]),
        global_batch_size=batch,
        layout=layout,
        layout_source=text["layout"],
        precision=text["precision"],
        step_s=_step_s(text, batch),
    )


def _step_s(text: dict[str, str], batch: int) -> float | None:
    if text["step_time_s"]:
        return float(text["step_time_s"])
    return batch / float(text["throughput"]) if text["throughput"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured step of a GPT on A100, published by others."""

    model: Model
    layout: Layout
    step_s: float


@cache
def measured(name: str) -> tuple[Measured, ...]:
    """Return the rows of vtrain_one_node, vtrain_many_nodes or selene, in the order of the table."""
    return tuple(_measured(each) for each in table(f"{name}.csv"))


def _measured(text: dict[str, str]) -> Measured:
    number = {key: int(value) for key, value in text.items() if key not in ("recompute", "step_time_s")}
    hidden, heads = number["hidden_size"], number["num_attention_heads"]
    recompute = text.get("recompute", "full")
    return Measured(
        model=replace(
            model("gpt3_175b"),
            name=f"gpt_{number['num_layers']}x{hidden}",
            num_layers=number["num_layers"],
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=heads,
            num_query_groups=heads,
        ),
        layout=Layout(
            tp=number["tp"],
            pp=number["pp"],
            cp=1,
            dp=number["dp"],
            vpp=number.get("vpp", 1),
            micro_batch_size=number["micro_batch_size"],
            global_batch_size=number["global_batch_size"],
            seq_length=number["seq_length"],
            recompute=recompute == "full",
            recompute_attention=recompute == "attention",
            graphs=False,
        ),
        step_s=float(text["step_time_s"]),
    )


@cache
def model(name: str) -> Model:
    """Return a model of conf/model."""
    return codec.typed(Model, _yaml(CONF / "model" / f"{name}.yaml"))


@cache
def rates(gpu: str) -> Rates:
    """Return the rates of a GPU: those of conf/gpu, measured by runstop, else those of data/rates.yaml."""
    document = _gpu(gpu) if has_file(gpu) else {}
    if document.get("rates"):
        return codec.typed(Rates, document["rates"])
    return codec.typed(Rates, data("rates.yaml")[gpu])


@cache
def gemm_start_us(gpu: str) -> float:
    """Return the start of a GEMM on a GPU; the same source as its rates."""
    return float(data("rates.yaml")["gemm_start_us"][gpu])


@dataclass(frozen=True, slots=True)
class Fp4:
    """GEMMs in NVFP4 on a GPU."""

    tflops: float
    gemm_start_us: float


@cache
def fp4(gpu: str) -> Fp4 | None:
    """Return the rate of GEMMs in NVFP4; None for a GPU without them."""
    known = data("rates.yaml")["fp4"].get(gpu)
    return None if known is None else Fp4(**known)


@cache
def attention_of_64(gpu: str) -> AttentionOfKind:
    """Return how attention with heads of 64 numbers and with windows differs on a GPU."""
    return AttentionOfKind(**data("rates.yaml")["attention_of_64"][gpu])


@cache
def data(name: str) -> dict[str, Any]:
    """Return a YAML file of `data/`."""
    return _yaml(DATA / name)


@cache
def gpu_name(gpu: str) -> str:
    """Return the name in a file of conf/gpu."""
    return str(_gpu(gpu)["name"])


def has_name(gpu: str, name: str) -> bool:
    """Return whether this is the name of a GPU of the published rows; some of these GPUs have no file."""
    return has_file(gpu) and gpu_name(gpu) == name


def has_file(gpu: str) -> bool:
    """Return whether a GPU has a file in conf/gpu."""
    return (CONF / "gpu" / f"{gpu}.yaml").is_file()


def _gpu(name: str) -> dict[str, Any]:
    """Return a file of conf/gpu, with the rates of the file on which it is based."""
    document = _yaml(CONF / "gpu" / f"{name}.yaml")
    for base in document.pop("defaults", []):
        if base != "_self_":
            inherited = _gpu(base)
            document = {**inherited, **document, "rates": {**inherited["rates"], **document["rates"]}}
    return document


@cache
def network(gpu: str) -> Network:
    """Return the links of the published systems with a GPU, by their data sheets and measurements on one node."""
    return codec.typed(Network, data("networks.yaml")[gpu])


@cache
def smaller_groups(gpu: str) -> tuple[tuple[int, float], ...]:
    """Return what collectives of fewer GPUs than those of a node reach, relative to `network(gpu).nvlink_gbs`."""
    return tuple(sorted(data("networks.yaml")["smaller_groups"].get(gpu, {}).items()))


def _yaml(path: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
