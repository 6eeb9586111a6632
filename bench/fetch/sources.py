"""Where the models and data of a config are from: the commands of `runstop fetch`, and the locations of MLPerf."""

import re
import shlex
from dataclasses import dataclass

from bench.contract.model import Model
from bench.contract.schema import Data

_ON_THE_HUB = re.compile(r"Hugging Face ([\w.-]+/[\w.-]+), config\.json")
"""How conf/model names the source of a model's sizes."""
_DATA = {
    "c4": ("allenai/c4", "$DATADIR/c4", "en/c4-train.0000?-of-01024.json.gz"),
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "$DATADIR/fineweb-edu", "sample/10BT/*"),
    "dolly": ("databricks/databricks-dolly-15k", "$DATADIR", "databricks-dolly-15k.jsonl"),
}
"""By data source: repository, FOLDER, --include. Source: the data set cards on Hugging Face."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where MLPerf keeps one input of a benchmark, and why runstop does not download it."""

    input: str
    reason: str
    steps: tuple[str, ...]
    """What the user does, in order; the commands are MLPerf's."""
    source: str


_DOWNLOADER = "https://raw.githubusercontent.com/mlcommons/r2-downloader/refs/heads/main/mlc-r2-downloader.sh"
_OWN_PROGRAM = (
    "it is downloaded by MLCommons' own program, which may install cloudflared with sudo and open a browser to log in"
)
_LLAMA31_README = "github.com/mlcommons/training, small_llm_pretraining/nemo/README.md, commit aa344c7"
_LLAMA2_README = "github.com/mlcommons/training, llama2_70b_lora/README.md, commit aa344c7"
_MEMBERS = "only members of MLCommons may download it, after they have agreed to a confidentiality notice"
_NOTICE = (
    "agree to the notice with the e-mail address of your organisation: https://llama2.mlcommons.org",
    "run the command of MLCommons R2 Downloader on the page to which MLCommons then sends you a link",
)


def _r2(folder: str, name: str) -> str:
    return f"bash <(curl -s {_DOWNLOADER}) -d {folder} https://training.mlcommons-storage.org/metadata/{name}.uri"


MLPERF = {
    "llama2_70b_lora": (
        Location(
            input="weights: Llama-2-70B, with q, k and v in one tensor",
            reason=_MEMBERS,
            steps=(
                *_NOTICE,
                "convert the weights: python -m jobs.tasks.convert weights plan.json FOLDER (docs/weights.md)",
            ),
            source=_LLAMA2_README,
        ),
        Location(
            input="rows: SCROLLS GovReport, tokenised, packed to 8,192 tokens",
            reason=_MEMBERS,
            steps=(*_NOTICE, "convert the rows: python -m jobs.tasks.convert rows plan.json SOURCE FOLDER"),
            source=_LLAMA2_README,
        ),
    ),
    "llama31_8b": (
        Location(
            input="rows: C4, tokenised, as .bin and .idx files of Megatron-LM",
            reason=_OWN_PROGRAM,
            steps=(_r2("llama3_1_8b_preprocessed_c4_dataset", "llama-3-1-8b-preprocessed-c4-dataset"),),
            source=_LLAMA31_README,
        ),
        Location(
            input="tokenizer of Llama 3.1 8B",
            reason=_OWN_PROGRAM,
            steps=(
                _r2("llama3_1_8b_tokenizer", "llama-3-1-8b-tokenizer"),
                "or, with access to Meta's repository: runstop fetch model meta-llama/Llama-3.1-8B FOLDER "
                "--include 'tokenizer*'",
            ),
            source=_LLAMA31_README,
        ),
    ),
}
"""By benchmark. The weights of llama31_8b are random: it is a pre-training."""


def model_command(model: Model, folder: str = "FOLDER") -> str:
    """Return the command that downloads a model of conf/model; empty if its config names no repository."""
    named = _ON_THE_HUB.fullmatch(model.source)
    return f"runstop fetch model {named[1]} {shlex.quote(folder)}" if named else ""


def data_command(data: Data) -> str:
    """Return the command that downloads the files of a data source; empty if there is none."""
    for_benchmark = {"gov_report": "llama2_70b_lora", "c4_mlperf": "llama31_8b"}
    if data.name in for_benchmark:
        return f"runstop fetch mlperf {for_benchmark[data.name]}"
    if data.source.name not in _DATA:
        return ""
    repo, folder, files = _DATA[data.source.name]
    return f"runstop fetch data {repo} {folder} --include {shlex.quote(files)}"
