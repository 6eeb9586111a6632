"""Which prompts are prefilled together, in which slots, and which steps follow; the model is a fake that counts."""

import warnings
from typing import Any

import pytest
import torch

from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.generation import Request
    from jobs.engines.megatron.generation import batch, kv_cache
    from jobs.engines.megatron.generation.batch import Advance, Batch, Begin, Finish, Prefills, schedule
    from jobs.engines.megatron.generation.forward import Prompts

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="what a GPU captures is a fake here")


@pytest.mark.parametrize(
    ("lengths", "num_slots", "is_continuous", "expected"),
    [
        ([], 2, True, []),
        ([1], 2, True, [Begin({0: 0}), Finish({0: 0})]),
        (
            [3, 1, 5, 2, 5],
            2,
            True,
            [
                *(Begin({2: 0, 4: 1}), Advance(4, 2), Finish({2: 0, 4: 1}), Begin({0: 0, 3: 1}), Advance(1, 2)),
                *(Finish({3: 1}), Begin({1: 1}), Finish({1: 1}), Advance(1, 1), Finish({0: 0})),
            ],
        ),
        (
            [3, 1, 5, 2, 5],
            2,
            False,
            [
                *(Begin({2: 0, 4: 1}), Advance(4, 2), Finish({2: 0, 4: 1}), Begin({0: 0, 3: 1}), Advance(1, 2)),
                *(Finish({3: 1}), Advance(1, 1), Finish({0: 0}), Begin({1: 0}), Finish({1: 0})),
            ],
        ),
        ([4, 2], 3, False, [Begin({0: 0, 1: 1}), Advance(1, 2), Finish({1: 1}), Advance(2, 1), Finish({0: 0})]),
    ],
)
def test_schedule(lengths: list[int], num_slots: int, is_continuous: bool, expected: list[Any]) -> None:
    assert list(schedule(lengths, num_slots, is_continuous=is_continuous)) == expected


class Model:
    """Each answer counts up from 100 times its prompt's first token; the calls are recorded."""

    def __init__(self, num_slots: int) -> None:
        self.cache = kv_cache.empty(num_slots, 64, layers=1, groups=1, dim=16, like=torch.empty(0))
        self.calls: list[Any] = []

    def prefill(self, prompts: Prompts) -> torch.Tensor:
        assert prompts.tokens_SB.is_contiguous()
        self.calls.append([getattr(prompts, name).tolist() for name in Prompts.__dataclass_fields__])
        tokens, slots = prompts.tokens_SB[0] * 100, prompts.slots_B
        self.cache.start(slots, tokens, prompts.lengths_B, prompts.seeds_B)
        return tokens

    def step(self, num_slots: int) -> None:
        self.calls.append(num_slots)
        part = self.cache.first(num_slots)
        part.append(part.tokens_B + 1)

    def batch(self, *numbers: int) -> Batch:
        steps = {number: lambda number=number: self.step(number) for number in numbers}
        return Batch(self.cache, steps, Prefills(self.prefill, is_captured=False), is_continuous=True)


REQUESTS = [Request((3, 9), 2), Request((4,), 5), Request((5, 8, 7), 3)]


def test_answers_are_in_the_order_of_the_requests() -> None:
    """The longest answers start first; seed 7 plus the index of a request is its seed, modulo 2^31."""
    model = Model(2)
    answers = model.batch(2, 1).generate(REQUESTS, seed=7)
    assert [answer.tokens for answer in answers] == [(300, 301), (400, 401, 402, 403, 404), (500, 501, 502)]
    first = [[[4, 5], [0, 8], [0, 7]], [1, 3], [0, 1], [8, 9]]
    assert model.calls == [first, 2, 2, [[[3], [9]], [2], [1], [7]], 2, 1]
    model = Model(3)
    model.batch(3).generate(REQUESTS, seed=2**31 - 1)
    assert model.calls == [[[[4, 5, 3], [0, 8, 9], [0, 7, 0]], [1, 3, 2], [0, 1, 2], [0, 1, 2**31 - 1]], 3, 3, 3, 3]


def test_a_prefill_has_at_most_16384_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch.PREFILLED_TOKENS == 16384
    monkeypatch.setattr(batch, "PREFILLED_TOKENS", 7)
    model = Model(3)
    model.batch(3).generate(REQUESTS, seed=0)
    assert [len(one[1]) for one in model.calls if isinstance(one, list)] == [2, 1], "three tokens each with padding"


def test_a_warm_up_has_few_steps() -> None:
    model = Model(3)
    warmed: list[torch.Size] = []
    one = model.batch(3)
    one.prefills.run = lambda prompts: warmed.append(prompts.tokens_SB.shape) or model.prefill(prompts)
    one.warm_up([Request((3, 9), 9), Request((4,), 2)])
    assert warmed == [torch.Size([2, 2])] and model.calls[1:] == [3, 3, 3], "one step, then two of seven"


def test_small_prefills_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured prefill reads its own copy of the prompts; equal shapes and large ones are not captured again."""
    captured: list[Any] = []

    def capture(run: Any, pool: Any) -> tuple[Any, torch.Tensor]:
        written = run().clone()
        captured.append(pool)
        return lambda: written.copy_(run()), written

    monkeypatch.setattr(batch.graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {len(captured)}")
    prefills = Prefills(lambda prompts: prompts.tokens_SB.sum(0) + prompts.seeds_B, is_captured=True)

    def prompts(length: int, num: int, value: int = 1) -> Prompts:
        numbers = torch.full((num,), length)
        return Prompts(torch.full((length, num), value), numbers, torch.arange(num), numbers * 0 + 1000)

    for shape in ((4, 2), (4, 2), (1024, 2), (1025, 2), (5, 1)):
        assert prefills.warm_up(prompts(*shape)).tolist() == [shape[0] + 1000] * shape[1]
    assert captured == ["pool 0"] * 3 and [tuple(shape) for shape in prefills.passes] == [(4, 2), (1024, 2), (5, 1)]
    first = prefills(prompts(4, 2, value=3))
    assert first is prefills.passes[torch.Size([4, 2])].tokens_B and first.tolist() == [1012, 1012]
    assert prefills(prompts(6, 1, value=2)).tolist() == [1012]
    for length in range(6, 50):
        prefills.warm_up(prompts(length, 1))
    assert len(prefills.passes) == 32
    plain = Prefills(prefills.run, is_captured=False)
    plain.warm_up(prompts(4, 2))
    assert plain.passes == {}


@pytest.mark.parametrize(("num_slots", "expected"), [(1, [1]), (16, [16, 1]), (33, [33, 32, 16, 1])])
def test_a_step_for_fewer_slots_ends_a_batch(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, expected: list[int]
) -> None:
    stepped: list[Any] = []
    monkeypatch.setattr(batch, "step", lambda *args: stepped.append((*args[::2], len(args[1].tokens_B))))
    cache = kv_cache.empty(num_slots, 64, layers=1, groups=1, dim=16, like=torch.empty(0))
    decoder, angles = object(), object()
    steps = batch.decode_steps(decoder, cache, angles)  # type: ignore[arg-type]
    assert list(steps) == expected and not stepped
    for number in expected:
        steps[number]()
    assert stepped == [(decoder, angles, number) for number in expected]
