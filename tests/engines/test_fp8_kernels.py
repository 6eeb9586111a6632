"""Every Triton kernel of the FP8 layer gives what the plain torch of `reference` gives, on a GPU or in Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    import os

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from jobs.engines.megatron.fp8 import gpu_ops, torch_ops
from jobs.engines.megatron.fp8.quantize import Adapted, Dropout, Lora, Quantized

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter: 1 / (1 + inf) is 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 5e-3 if DEVICE == "cuda" else 0.1  # Triton's interpreter cuts where hardware rounds
ROWS, RANK, DROP = 88, 12, Dropout(0.1, 2_000_000_011)
WIDTHS = (256, 1344)


def random(*shape: int, spread: float = 1.0) -> torch.Tensor:
    """Return BF16 numbers whose rows differ in size, some of them by a lot."""
    rows = torch.logspace(-2, 2, shape[0], device=DEVICE)[:, None] if len(shape) > 1 else 1
    return (torch.randn(shape, device=DEVICE) * rows * spread).bfloat16()


def numbers(x: torch.Tensor | Quantized) -> torch.Tensor:
    if isinstance(x, Quantized):
        return (x.values.float() * x.scale[:, None]).double()
    return x.double()


def same(got: object, expected: object, *, tolerance: float) -> None:
    """Compare tensors, or tuples of them, by relative error; what is quantised may be off by a rounding here and there."""
    assert type(got) is type(expected)
    if isinstance(got, tuple) and not isinstance(got, Quantized):
        for pair in zip(got, expected, strict=True):
            same(*pair, tolerance=tolerance)
        return
    error = (numbers(got) - numbers(expected)).norm() / numbers(expected).norm()
    assert math.isfinite(error) and error <= tolerance, f"{error} above {tolerance}"


def normed(width: int) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
    weight = 1 + random(width, spread=0.1)
    weight[3] = 0
    values, rstd = torch_ops.norm_quantize(random(ROWS, width), weight, 1e-5)
    return values, rstd, weight


def cases(width: int) -> dict[str, tuple]:
    x, y, weight = random(ROWS, width), random(ROWS, width), 1 + random(width, spread=0.1)
    kept, rstd, of_norm = normed(width)
    a, low, kept_all = random(RANK, width), random(ROWS, RANK), Dropout(0.0, 1)
    many, low_of_many = random(600, width), random(600, RANK)
    return {
        "quantize": (x,),
        "down": (x, a, DROP),
        "down of FP8": (kept, a, DROP),
        "down_backward": (low, x, DROP),
        "down_backward of FP8": (low, kept, DROP),
        "add_down_gradient": (x, low, a, DROP),
        "down_backward of many rows": (low_of_many, many, DROP),
        "down without dropout": (x, a, kept_all),
        "down_backward without dropout": (low, x, kept_all),
        "add_down_gradient without dropout": (x, low, a, kept_all),
        "norm_quantize": (x, weight, 1e-5),
        "add_norm_quantize": (x, y, weight, 1e-5),
        "norm_backward": (x, y, kept, rstd, of_norm, Adapted(random(ROWS, width), DROP)),
        "norm_backward_quantize": (x, y, kept, rstd, of_norm),
        "swiglu_quantize": (random(ROWS, 2 * width),),
        "swiglu_backward_quantize": (x, torch_ops.swiglu_quantize(random(ROWS, 2 * width))[1]),
        "transpose": (Quantized(torch_ops.quantize(x).values, torch.ones(1, device=DEVICE)),),
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", cases(16))
def test_a_kernel_gives_what_plain_torch_gives(name: str, width: int) -> None:
    torch.manual_seed(width)
    args, operation = cases(width)[name], name.split()[0]
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    same(getattr(gpu_ops, operation)(*args), getattr(torch_ops, operation)(*copies), tolerance=TOLERANCE)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("groups", "repeats", "dim"), [(2, 4, 32), (3, 1, 64)])
def test_rope_there_and_back(groups: int, repeats: int, dim: int, adapted: bool) -> None:
    torch.manual_seed(groups)
    freqs = torch.rand(ROWS, dim // 2, device=DEVICE).repeat(1, 2) * 50
    width = groups * (repeats + 2) * dim
    qkv, lora = random(ROWS, width), Lora(random(ROWS, RANK), random(width, RANK, spread=0.01), 2.0)
    got, expected = (made.rope(qkv, freqs, groups, lora if adapted else None) for made in (gpu_ops, torch_ops))
    same(got, expected, tolerance=TOLERANCE)
    same(gpu_ops.rope_backward(*got, freqs), torch_ops.rope_backward(*expected, freqs), tolerance=TOLERANCE)
    turned_back = torch_ops.rope_backward(*expected, freqs)[0]
    added = lora.scale * numbers(lora.low) @ numbers(lora.b).T if adapted else 0
    same(turned_back, (numbers(qkv) + added).bfloat16(), tolerance=1e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLAS")
def test_the_product_is_that_of_the_numbers() -> None:
    x, weight = torch_ops.quantize(random(64, 512)), torch_ops.quantize(random(256, 512))
    weight = Quantized(weight.values, torch.full((1,), 0.37, device=DEVICE))
    expected = numbers(x) @ (weight.values.double() * 0.37).T
    same(gpu_ops.matmul(x, weight), expected.bfloat16(), tolerance=TOLERANCE)


def test_dropout_drops_its_share_and_differs_between_seeds_and_neighbours() -> None:
    ones, identity = torch.ones(1000, 1000, device=DEVICE), torch.eye(1000, device=DEVICE)
    masks = [torch_ops.down(ones, identity, Dropout(0.1, seed)) for seed in (1, 2, 3)]
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0, 1 / 0.9], rel=2**-9)  # in BF16
        assert (mask == 0).double().mean().item() == pytest.approx(0.1, abs=0.001)
    for one, other in ((masks[0], masks[1]), (masks[0][:, ::2], masks[0][:, 1::2])):
        both = ((one == 0) & (other == 0)).double().mean().item()
        assert both == pytest.approx(0.01, abs=0.0005), "masks must be independent"
