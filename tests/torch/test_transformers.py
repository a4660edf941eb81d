"""Architectures that we did not write, with random weights: whole against split, unequal masks, float64.

RMSNorm in Llama, T5 and Mixtral computes in float32 whatever the model's dtype, and so does the causal loss that
comes with the models, so these agree to 1e-6.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from models import take_gradients, whole_gradients
from torch import nn

from reference import EXACT, assert_exact
from wholebatch import LossError, Mean
from wholebatch.torch import Accumulator, check, token_mean

ROWS, LENGTH, VOCABULARY = 7, 12, 40
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens() -> dict[str, torch.Tensor]:
    """Right-padded rows of unequal length; labels are -100 where there is padding, and over one whole row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([12, 3, 7, 12, 1, 5, 9])
    mask = torch.arange(LENGTH) < lengths[:, None]
    labels = ids.masked_fill(~mask, -100)
    labels[2] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64),
        "labels": torch.randint(5, (ROWS,), generator=generator),
    }


@dataclass(frozen=True)
class Architecture:
    """`split` is what a user of the library writes, `whole` what the unsplit batch means."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    split: Callable[[nn.Module, Any], Any]
    whole: Callable[[nn.Module, Any], torch.Tensor]
    counts: Callable[[Any], dict[str, Any]] | None = None
    tolerance: float = EXACT


def own_loss(model, batch):
    return model(**batch).loss


def causal_mean(model, batch):
    """The mean over tokens of a causal language model, in the model's own precision."""
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


def by_token_mean(model, batch):
    labels = batch["labels"]
    return token_mean(model(**batch).logits, labels)


def by_token_mean_unshifted(model, batch):
    return token_mean(model(**batch).logits, batch["labels"], shift=False)


def by_num_items(model, batch):
    tokens = (batch["labels"][:, 1:] != -100).sum()
    return Mean(model(**batch, num_items_in_batch=1).loss, tokens)


def gpt2():
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return hf.GPT2LMHeadModel(config)


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **SMALL))


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SMALL))


def t5():
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, num_labels=5, **SMALL))


def mixtral():
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        output_router_logits=True,
        **SMALL,
    )
    return hf.MixtralForCausalLM(config)


def router_z(output, mask):
    """log-sum-exp squared of the router's logits, summed over layers and the tokens that are there."""
    kept = mask.reshape(-1)
    return sum((torch.logsumexp(logits, -1).square() * kept).sum() for logits in output.router_logits)


def mixtral_split(model, batch):
    output = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    mask = batch["attention_mask"]
    return {
        "nll": token_mean(output.logits, batch["labels"]),
        "router z": 0.001 * Mean(router_z(output, mask), mask.sum()),
    }


def mixtral_whole(model, batch):
    output = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    shifted = nn.functional.cross_entropy(
        output.logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1)
    )
    return shifted + 0.001 * router_z(output, batch["attention_mask"]) / batch["attention_mask"].sum()


def mixtral_counts(batch):
    return {"nll": (batch["labels"][:, 1:] != -100).sum(), "router z": batch["attention_mask"].sum()}


ARCHITECTURES = {
    "GPT-2": Architecture(gpt2, tokens, by_token_mean, causal_mean),
    "GPT-2 by num_items_in_batch": Architecture(gpt2, tokens, by_num_items, own_loss, tolerance=1e-6),
    "Llama": Architecture(llama, tokens, by_token_mean, own_loss, tolerance=1e-6),
    "BERT": Architecture(bert, tokens, by_token_mean_unshifted, own_loss),
    "T5": Architecture(t5, tokens, by_token_mean_unshifted, own_loss, tolerance=1e-6),
    "ViT": Architecture(vit, images, own_loss, own_loss),
    "Mixtral with router z-loss": Architecture(
        mixtral, tokens, mixtral_split, mixtral_whole, counts=mixtral_counts, tolerance=1e-6
    ),
}


@pytest.fixture(params=ARCHITECTURES.values(), ids=ARCHITECTURES)
def architecture(request) -> Architecture:
    return request.param


MASKED = {name: architecture for name, architecture in ARCHITECTURES.items() if architecture.batch is tokens}


def prepared(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


@pytest.mark.parametrize("cut", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"num_micro_batches": 2}])
def test_split_equals_whole(architecture, cut):
    model, batch = prepared(architecture.make), architecture.batch()
    whole = whole_gradients(model, lambda: architecture.whole(model, batch))
    result = Accumulator(model, **cut).backward(
        lambda piece: architecture.split(model, piece), batch, counts=architecture.counts
    )
    assert_exact(take_gradients(model), whole, tolerance=architecture.tolerance)
    assert result.loss.item() == pytest.approx(architecture.whole(model, batch).item(), rel=1e-6)


@pytest.mark.parametrize("architecture", MASKED.values(), ids=MASKED)
def test_the_mean_of_means_fails_on_every_masked_architecture(architecture):
    model, batch = prepared(architecture.make), architecture.batch()
    whole = whole_gradients(model, lambda: architecture.whole(model, batch))
    for rows in (slice(0, 4), slice(4, 7)):
        piece = {name: tensor[rows] for name, tensor in batch.items()}
        (architecture.whole(model, piece) / 2).backward()
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(take_gradients(model), whole, tolerance=1e-3)


def test_the_models_own_mean_is_refused_over_ignored_labels():
    model = prepared(gpt2)
    with pytest.raises(LossError, match="token_mean"):
        Accumulator(model, micro_batch_size=3).backward(lambda piece: own_loss(model, piece), tokens())


def test_a_models_output_is_no_loss():
    model = prepared(gpt2)
    with pytest.raises(LossError, match="term 'logits' must be a scalar"):
        Accumulator(model, micro_batch_size=3).backward(lambda piece: model(**piece), tokens())


def test_rows_that_see_each_other_cannot_be_split():
    """CLIP's loss compares every row with every other one; `check` finds it, no cut is exact."""
    config = hf.CLIPConfig(
        text_config={"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, **SMALL},
        vision_config={"image_size": 16, "patch_size": 8, **SMALL},
        projection_dim=8,
    )
    model = prepared(lambda: hf.CLIPModel(config))
    batch = {
        "input_ids": tokens()["input_ids"],
        "attention_mask": tokens()["attention_mask"],
        "pixel_values": images()["pixel_values"],
    }
    report = check(model, lambda piece: model(**piece, return_loss=True).loss, batch)
    assert report.error > 1e-3
    assert not report.exact
    assert report.cause == "coupled-rows"
    assert report.failure is None


def test_load_balancing_is_a_product_of_means_and_cannot_be_split():
    model = prepared(mixtral)
    batch = tokens()
    del batch["labels"]
    report = check(model, lambda piece: model(**piece).aux_loss, batch)
    assert not report.exact
    assert report.cause == "coupled-rows"
    assert report.error > 1e-3


def test_check_agrees_on_every_architecture(architecture):
    model = prepared(architecture.make)
    assert check(model, lambda piece: architecture.split(model, piece), architecture.batch()).exact
