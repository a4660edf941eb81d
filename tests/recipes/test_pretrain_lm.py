"""Pre-training by micro-batches ends with the weights of whole batches."""

import copy

import pytest
import torch

from reference import assert_exact
from wholebatch import BatchError
from wholebatch.recipes.pretrain_lm import LanguageModel, main, pretrain, pretrain_on_whole_batches


def weights(model):
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def updates_said(text):
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("step")]


def test_a_line_at_each_weight_update_and_the_weights_of_whole_batches(capsys):
    assert main()
    said = capsys.readouterr().out
    assert updates_said(said) == [4, 8, 12, 16, 20]
    assert "5 updates, 8 sequences at a time" in said
    assert "5 updates, whole batches of 32" in said
    assert "1e-12 is allowed: they agree" in said


def test_in_float32_within_a_hundredth_of_a_step(capsys):
    assert main(dtype="float32")
    assert "1e-05 is allowed: they agree" in capsys.readouterr().out


def test_every_number_is_an_option(capsys):
    assert main(
        vocabulary=50, width=8, length=5, lr=1e-2, micro_batch_size=3, accumulation_steps=3, micro_steps=8, seed=1
    )
    said = capsys.readouterr().out
    assert updates_said(said) == [3, 6, 8], "the last window holds what is left"
    assert "3 updates, whole batches of 9" in said


def test_updates_are_those_of_whole_batches_and_training_moves_the_weights():
    torch.manual_seed(0)
    model = LanguageModel(20, 4).double()
    start, twin = copy.deepcopy(model), copy.deepcopy(model)
    ids = torch.randint(20, (6, 2, 5))
    updates = pretrain(model, ids, 1e-2, 4)
    losses = pretrain_on_whole_batches(twin, [ids[:4].flatten(0, 1), ids[4:].flatten(0, 1)], 1e-2)
    assert [loss for _, loss in updates] == pytest.approx(losses, rel=1e-12)
    assert_exact(weights(model), weights(twin))
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(model), weights(start), 1e-3)


def test_sequences_of_unequal_length_count_by_their_tokens():
    """Padding is marked with -100 in the labels; here the micro-batches themselves differ in length."""
    torch.manual_seed(0)
    model = LanguageModel(20, 4).double()
    short, long = torch.randint(20, (2, 3)), torch.randint(20, (2, 9))
    ((_, loss),) = pretrain(copy.deepcopy(model), [short, long], 1e-2, 2)
    means = [pretrain_on_whole_batches(copy.deepcopy(model), [ids], 1e-2)[0] for ids in (short, long)]
    assert loss == pytest.approx((4 * means[0] + 16 * means[1]) / 20, rel=1e-12)
    assert loss != pytest.approx(sum(means) / 2, rel=1e-3)


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(BatchError, match="there are no micro-batches to pre-train on"):
        pretrain(LanguageModel(20, 4), [], 1e-3, 4)
