"""Configs with hostile texts at every place that takes a text; composed once, then changed as data."""

import pickle
import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from bench import texts
from bench.contract.cluster import Slurm
from bench.contract.plan import Plan
from bench.contract.schema import Config, ContainerFlags
from bench.planning import compose, make_plan
from bench.planning.checks.texts import PATHS

FRAGMENTS = (
    *(
        "$(touch pwned)",
        "`touch pwned`",
        ";touch pwned;",
        "&& touch pwned",
        "| touch pwned",
        "touch pwned",
        "\ntouch pwned\n",
    ),
    *("\n#SBATCH --nodes=99\n", "#SBATCH --nodes=99", "\nPLAN\n", "PLAN", "\nmain\n", "EOF", "}"),
    *(
        "..",
        "../../x",
        "/",
        "-rf",
        "--wrap=touch pwned",
        "{a,b}",
        "*",
        "?",
        "[a-z]",
        "~",
        "!",
        "#",
        "%j",
        "=",
        ",",
        ":",
    ),
    *("'", '"', "\\", "\\\n", "\n", "\r", "\t", "\0", "\x1b[2J", "\u202e", "\u2028", "\u200b", "\u2400", "\udc80"),
    *(" ", "größe", "測試", "$DATADIR", "$CONT", "${HOME}", "$run", "$HOME", "$", "$((1", "A" * 300),
)
PAYLOADS = (
    *("a$(touch pwned)", "a`touch pwned`", 'a";touch pwned;"', "a';touch pwned;'", "a;touch pwned", "a&&touch pwned"),
    *(
        "a|touch pwned",
        'a\\";touch pwned;',
        "a) touch pwned",
        "a');touch pwned;(",
        "a #`touch pwned`",
        "$CONT`touch pwned`",
    ),
    *("{touch,pwned}", ">pwned", "a >pwned", "~/*", "-rf", "--wrap=touch pwned", "größe 測試", "it's"),
)
"""What would run, write or expand if one place of a script did not quote it."""
hostile = st.one_of(
    st.sampled_from(PAYLOADS),
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4).map("".join),
    st.text(max_size=12),
    st.sampled_from(["", "A" * 5000]),
)


def base_configs() -> tuple[Config, Config]:
    """Return a config with a text at every place that takes one, and that of its base task."""
    plan = compose.compose(["task=lora_tiny", "cluster=slurm_test", "container=pyxis"])
    config = plan.config
    config.cluster.slurm = Slurm(
        partition="batch", gpu_type="h100", account="acme", qos="high", reservation="r1", arguments=["--exclude=dgx-7"]
    )
    config.cluster.slurm.gpu_request = config.cluster.slurm.gpu_request.gres_typed
    config.cluster.environment, config.cluster.drop_caches = {"SITE": "x"}, "sudo -n true"
    config.container.mounts = ["/etc/hosts:/etc/hosts:ro"]
    assert plan.base is not None
    return config, plan.base.config


CONFIG, BASE = (pickle.dumps(config) for config in base_configs())
KEY = "cluster.environment: a key"
PLACES = [place.removeprefix(".") for place, name, _ in texts.strings(pickle.loads(CONFIG), "") if name]


def changed(changes: dict[str, str]) -> Config:
    config: Config = pickle.loads(CONFIG)
    for place, text in changes.items():
        if place == KEY:
            config.cluster.environment[text] = "y"
            continue
        *nodes, last = re.findall(r"\w+", place)
        node: Any = config
        for name in nodes:
            node = getattr(node, name)
        if isinstance(node, list):
            node[int(last)] = text
        elif isinstance(node, dict):
            node[last] = text
        else:
            setattr(node, last, text)
    return config


def planned(changes: dict[str, str], *, array: bool = False, by_environment: bool = False) -> Plan:
    config, base = changed(changes), pickle.loads(BASE)
    config.launch.array = array
    config.container.flags = ContainerFlags.environment if by_environment else ContainerFlags.arguments
    base.cluster, base.container = config.cluster, config.container
    return make_plan.make(config, base)


def placed(place: str, text: str, root: Path) -> str:
    """Return a text for a place; a path stays below the folder of the test, however often it goes up."""
    is_path = place in PATHS - {"container.image"}
    return f"{root}/{'d/' * 20}{text}" if is_path and (text.startswith("/") or ".." in text) else text
