"""The loss and its gradient compared with torch's cross-entropy in FP64; without a GPU its kernels are interpreted."""

import sys
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


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.usefixtures("interpreter_that_rounds")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # -inf - -inf, which tl.where leaves out
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_cross_entropy_on_a_part_of_the_vocabulary(dtype: torch.dtype) -> None:
    from jobs.engines.megatron import loss_kernels

    torch.manual_seed(0)
    num_rows, width = 7, 4096 + 907  # more columns than the kernels process at once
    logits = (torch.randn(num_rows, width, device=ranks.DEVICE) * 5).to(dtype)
    logits[0, :4096] = float("-inf")  # a full chunk, as in a padded vocabulary
    logits[1] += 1000
    labels = torch.tensor([4100, 0, 4095, 4096, width - 1, -1, width], device=ranks.DEVICE)
    lse, picked = loss_kernels.forward(logits, labels)
    exact = logits.double()
    torch.testing.assert_close(lse.double(), exact.logsumexp(1), rtol=1e-6, atol=1e-5)
    assert picked.tolist() == [*exact[range(5), labels[:5]].tolist(), 0, 0], "other ranks have the last two labels"
    grad = torch.randn(num_rows, device=ranks.DEVICE)
    hit = torch.zeros_like(exact)
    hit[range(5), labels[:5]] = 1
    expected = (exact.softmax(1) - hit) * grad[:, None]
    loss_kernels.backward_(logits, labels, lse, grad)
    error = (logits.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-4 if dtype is torch.float32 else 4e-3)
