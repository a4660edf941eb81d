"""What plans are made for in the tests: each function returns (model, loss_fn, batch)."""

import torch
from torch import nn
from torch.nn import functional

from wholebatch.torch import token_mean


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, width, layers, length, vocabulary, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def gpt(rows=16, width=256, layers=4, length=64, vocabulary=50257, dtype=torch.float32):
    torch.manual_seed(0)
    model = GPT(width, layers, length, vocabulary).to(dtype)
    return model, lambda ids: token_mean(model(ids), ids), torch.randint(vocabulary, (rows, length))


def small_gpt(rows=16, dtype=torch.float32):
    return gpt(rows, width=64, layers=2, length=32, vocabulary=2000, dtype=dtype)


def convolutions(rows=16):
    torch.manual_seed(0)
    layers, channels = [], 3
    for wider in (32, 64, 128):
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        channels = wider
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 10))
    x, y = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    return model, lambda b: functional.cross_entropy(model(b[0]), b[1]), (x, y)


def many_uses(rows=16):
    """A tensor that is used many times: its gradients, each as large as it, are added up."""
    torch.manual_seed(0)
    model = nn.Linear(64, 1024)

    def loss_fn(x):
        hidden = model(x)
        return functional.mse_loss(sum(hidden[:, i].tanh() for i in range(8)), x[:, 0, :1].expand(-1, 1024))

    return model, loss_fn, torch.randn(rows, 64, 64)


def mixture_of_experts(rows=16):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = MixtralForCausalLM(config)
    return model, lambda ids: token_mean(model(ids, use_cache=False).logits, ids), torch.randint(1000, (rows, 32))


def bert(rows=16):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    model = BertForMaskedLM(config)
    ids, mask = torch.randint(2000, (rows, 64)), torch.ones(rows, 64, dtype=torch.long)
    mask[:, 50:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return model, lambda b: token_mean(model(**{**b, "labels": None}).logits, b["labels"], shift=False), batch


def t5(rows=16):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=2000, d_model=128, num_layers=2, num_heads=4, d_ff=512, d_kv=32, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    ids = torch.randint(2000, (rows, 48))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return model, lambda b: token_mean(model(**b).logits, b["labels"], shift=False), batch
