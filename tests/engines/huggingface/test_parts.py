"""Parts of the peer in this process: what is refused, what attention is seen to take, what is kept in host memory."""

from importlib import util
from pathlib import Path

import pytest
import torch

from bench.errors import ConfigError
from helpers import ranks
from helpers.peer_runs import BLOCK, TRAINS, composed, needed

needed()

from jobs.engines.huggingface import activations, packages  # noqa: E402
from jobs.engines.huggingface.observed import Observed  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="nothing here differs on a GPU")

MISSING = {
    "accelerate": (TRAINS["all"], "engine=huggingface needs accelerate"),
    "peft": (TRAINS["lora"], "task.training.trains=lora needs peft"),
    "bitsandbytes": (
        (*TRAINS["lora"], "task.training.trains=qlora", "precision=bf16"),
        "task.training.trains=qlora needs bitsandbytes",
    ),
    "deepspeed": ((*TRAINS["all"], f"{BLOCK}.strategy=deepspeed"), "strategy=deepspeed needs deepspeed"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_installed_is_refused_with_how_to_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, what = MISSING[name]
    plan = composed(tmp_path, *overrides)
    packages.require(plan)
    found = util.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda asked: None if asked == name else found(asked))
    with pytest.raises(ConfigError, match=r"pip install 'runstop\[peer\]'") as caught:
        packages.require(plan)
    assert what in str(caught.value)


def test_flash_attention_is_refused_with_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = composed(tmp_path, *TRAINS["all"])
    plan.config.engine.huggingface.attention = packages.Attention.flash_attention_2
    monkeypatch.setattr(packages, "find_spec", lambda asked: None if asked == "flash_attn" else asked)
    with pytest.raises(ConfigError, match="pip install flash-attn --no-build-isolation"):
        packages.require(plan)


def test_the_kernel_that_attention_takes_is_the_one_that_is_named() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    names = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        observed = Observed()
        with sdpa_kernel(backend), observed:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        names[backend] = observed.attention("sdpa")
    assert names == {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.MATH: "math"}
    assert Observed().attention("eager") == "eager"


def test_stored_activations_are_copies() -> None:
    """Changing the memory that they came from changes no gradient; weights are not copied, and theirs would."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with activations.in_host_memory(model, least_bytes=0):
        hidden = model[0](x)
        loss = model[1](hidden).square().sum()
    saved = hidden.detach().clone()
    hidden.data.zero_()
    loss.backward()
    out_grad = 2 * (model[1](saved)).detach()
    torch.testing.assert_close(model[1].weight.grad, out_grad.T @ saved)
    with activations.in_host_memory(model, least_bytes=0):
        inputs = torch.randn(4, 8, requires_grad=True)
        loss = model[1](inputs).sum()
    with torch.no_grad():
        model[1].weight.data.fill_(3.0)  # unseen by autograd, which has kept no copy
    loss.backward()
    torch.testing.assert_close(inputs.grad, torch.full((4, 8), 24.0))
