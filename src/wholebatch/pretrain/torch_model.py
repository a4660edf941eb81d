"""The GPT in PyTorch: pre-norm blocks, learned positions, and a head that is the token embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .settings import Settings


class Block(nn.Module):
    """Attention and a wider layer, each added to what comes in."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.heads, self.dropout = settings.heads, settings.dropout
        self.before_attention = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self._drop(self.out(mixed))
        return x + self._drop(self.down(functional.gelu(self.up(self.before_mlp(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """From token ids of shape (rows, tokens) to the scores of what follows each."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.tokens = nn.Embedding(vocabulary, settings.width)
        self.positions = nn.Embedding(settings.seq_len, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores
