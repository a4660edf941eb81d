"""`compare_gradients` judges loops in torch."""

import pytest
import torch
from models import make_data, make_loss, make_model
from torch import nn

from wholebatch import BatchError, OptionError
from wholebatch.torch import backward, compare_gradients


def gradients(run):
    model = make_model()
    run(model)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(model):
    make_loss(model)(make_data()).backward()


def loop(*shares):
    """Pieces of 4, 4 and 2 rows with these shares of their losses."""

    def run(model):
        x, y = make_data()
        for share, x, y in zip(shares, x.split(4), y.split(4), strict=True):  # noqa: B020
            (make_loss(model)((x, y)) * share).backward()

    return run


def test_the_library_is_equal_to_the_whole():
    split = gradients(lambda model: backward(model, make_loss(model), make_data(), micro_batch_size=3))
    assert compare_gradients(split, gradients(whole)).equal


def test_the_loops_that_people_write():
    right = gradients(whole)
    assert compare_gradients(gradients(loop(0.4, 0.4, 0.2)), right).equal
    summed = compare_gradients(gradients(loop(4, 4, 2)), right, rows=10)
    assert summed.ratio == pytest.approx(10)
    assert "a sum over 10 rows" in summed.explanation
    mean_of_means = compare_gradients(gradients(loop(1 / 3, 1 / 3, 1 / 3)), right)
    assert mean_of_means.ratio is None
    assert "A mean of means" in mean_of_means.explanation


def test_modules_lists_and_names():
    model, twin = make_model(), make_model()
    whole(model)
    loop(0.2, 0.2, 0.1)(twin)
    by_module = compare_gradients(twin, model)
    assert by_module.ratio == pytest.approx(0.5)
    assert set(by_module.ratios) == set(dict(model.named_parameters()))
    lists = [[p.grad for p in owner.parameters()] for owner in (twin, model)]
    assert set(compare_gradients(*lists).ratios) == {"0", "1", "2", "3"}
    assert set(compare_gradients(*lists, names=["a", "b", "c", "d"]).ratios) == set("abcd")
    assert compare_gradients(lists[0][0], lists[1][0]).ratio == pytest.approx(0.5)


def test_missing_sparse_and_complex_gradients():
    right = {"dense": torch.ones(3), "none": None, "complex": torch.tensor([1j, 2.0])}
    sparse = torch.sparse_coo_tensor([[0, 1, 2]], [1.0, 1.0, 1.0], (3,), check_invariants=True)
    assert compare_gradients({**right, "dense": sparse}, right).equal
    assert compare_gradients({**right, "none": torch.zeros(2)}, right).equal
    assert "dense: no gradient" in compare_gradients({**right, "dense": None}, right).explanation
    assert not compare_gradients({**right, "complex": torch.tensor([1j, -2.0])}, right).equal


def test_float32_and_bfloat16_are_compared_within_their_rounding():
    right = {"a": torch.randn(64, generator=torch.Generator().manual_seed(0))}
    assert compare_gradients({"a": right["a"] * (1 + 1e-7)}, right).equal
    assert not compare_gradients({"a": right["a"] * (1 + 1e-4)}, right).equal
    assert compare_gradients({"a": right["a"].bfloat16()}, right).equal
    assert compare_gradients({"a": right["a"].bfloat16() / 2}, right, num_micro_batches=2).ratio == pytest.approx(
        0.5, rel=1e-2
    )


def test_what_cannot_be_compared_is_said():
    one, two = {"a": torch.ones(2)}, {"b": torch.ones(2)}
    with pytest.raises(OptionError, match=r"hold different gradients: \['a', 'b'\]"):
        compare_gradients(one, two)
    with pytest.raises(OptionError, match=r"a has shape \(2,\) in a and \(3,\) in b"):
        compare_gradients(one, {"a": torch.ones(3)})
    with pytest.raises(OptionError, match="a holds 1 gradients, but 2 names were given"):
        compare_gradients([torch.ones(2)], [torch.ones(2)], names=["x", "y"])
    with pytest.raises(TypeError, match="a must be gradients in a mapping or a sequence, or a module, got int"):
        compare_gradients(3, one)
    with pytest.raises(TypeError, match=r"a\['x'\] must be a floating point tensor or None, got int"):
        compare_gradients({"x": 3}, one)
    with pytest.raises(BatchError, match="there are no gradients"):
        compare_gradients(nn.Linear(2, 1), nn.Linear(2, 1))
