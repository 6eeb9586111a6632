"""The loss and its gradient against torch's own cross-entropy, as kernels on a GPU and as plain torch without one."""

import warnings

import pytest
import torch

from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import loss


class Part:
    """The TP group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(loss.parallel_state, "get_tensor_model_parallel_group", Part)
    torch.manual_seed(0)
    logits = (torch.randn(37, 5003, device=ranks.DEVICE) * 5).to(dtype)
    labels, grad = torch.randint(5003, (37,), device=ranks.DEVICE), torch.randn(37, device=ranks.DEVICE)
    expected = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(expected, labels, reduction="none")
    wanted.backward(grad.double())
    spent = logits.clone().requires_grad_()
    got = loss.cross_entropy(spent.clone(), labels)
    got.backward(grad)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    error = (spent.grad.double() - expected.grad).norm() / expected.grad.norm()
    assert error < (1e-5 if dtype is torch.float32 else 4e-3)
