"""What is trained in torch: models, random batches, losses."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from .._mean import Mean
from ..torch import token_mean

Batch = tuple[Tensor, ...]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class _GPT(nn.Module):
    """The head and the embedding share their weight."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Problem:
    """A model, its batches and its loss."""

    rows = 16
    steps = True
    """Whether gradients are clipped and an optimizer takes a step."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batch(self) -> Batch:
        raise NotImplementedError

    def loss(self, model: nn.Module, piece: Batch) -> Any:
        """What the library is given: a scalar, or a `Mean`."""
        raise NotImplementedError

    def by_hand(self, model: nn.Module, piece: Batch, batch: Batch, pieces: int) -> Tensor:
        """What is right for a loop that divides by the number of pieces: for equal pieces it is their mean."""
        loss: Tensor = self.loss(model, piece)
        return loss

    def options(self, micro_batch_size: int) -> dict[str, Any]:
        """How the library cuts it."""
        return {"micro_batch_size": micro_batch_size}


class GPT(Problem):
    """Next tokens, rows of one length."""

    def __init__(
        self, vocabulary: int, width: int = 256, layers: int = 4, length: int = 64, heads: int = 4, rows: int = 16
    ) -> None:
        self.vocabulary, self.width, self.layers = vocabulary, width, layers
        self.length, self.heads, self.rows = length, heads, rows

    def model(self) -> nn.Module:
        return _GPT(self.vocabulary, self.width, self.layers, self.length, self.heads)

    def batch(self) -> Batch:
        ids = torch.randint(self.vocabulary, (self.rows, self.length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss(self, model: nn.Module, piece: Batch) -> Any:
        ids, labels = piece
        return cross_entropy(model(ids).flatten(0, 1), labels.flatten())


class Ragged(GPT):
    """Rows of log-normal lengths, padded to the longest; the loss is the mean over tokens."""

    def __init__(self, width: int = 128, layers: int = 4, vocabulary: int = 1000, rows: int = 16, longest: int = 512):
        super().__init__(vocabulary, width, layers, longest, rows=rows)

    def batch(self) -> Batch:
        lengths = torch.empty(self.rows).log_normal_(4.5, 0.8).long().clamp_(16, self.length)
        lengths[0] = self.length
        ids, labels = super().batch()
        padding = torch.arange(self.length) >= lengths[torch.randperm(self.rows)].unsqueeze(1)
        return ids.masked_fill(padding, 0), labels.masked_fill(padding, -100)

    def loss(self, model: nn.Module, piece: Batch) -> Mean:
        ids, labels = piece
        return token_mean(model(ids), labels, shift=False)

    def by_hand(self, model: nn.Module, piece: Batch, batch: Batch, pieces: int) -> Tensor:
        ids, labels = piece
        tokens = (batch[1] != -100).sum()
        return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") * pieces / tokens

    def options(self, micro_batch_size: int) -> dict[str, Any]:
        """As many tokens as the padded pieces of the loop have."""
        return {
            "lengths": lambda batch: (batch[1] != -100).sum(1),
            "micro_batch_tokens": micro_batch_size * self.length,
        }


class Tiny(Problem):
    """Next to no work, so that what a loop costs is seen: a GPT of 30,000 weights, or two layers."""

    rows = 64

    def __init__(self, kind: int) -> None:
        self._gpt = GPT(100, width=32, layers=2, length=16, rows=self.rows) if kind == 0 else None

    def model(self) -> nn.Module:
        return self._gpt.model() if self._gpt else nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(self) -> Batch:
        return self._gpt.batch() if self._gpt else (torch.randn(self.rows, 16), torch.randn(self.rows, 1))

    def loss(self, model: nn.Module, piece: Batch) -> Any:
        return self._gpt.loss(model, piece) if self._gpt else mse_loss(model(piece[0]), piece[1])


class Images(Problem):
    """Ten classes of small images."""

    def __init__(self, rows: int = 64, side: int = 32) -> None:
        self.rows, self.side = rows, side

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    def batch(self) -> Batch:
        return torch.randn(self.rows, 3, self.side, self.side), torch.randint(10, (self.rows,))

    def loss(self, model: nn.Module, piece: Batch) -> Any:
        return cross_entropy(model(piece[0]), piece[1])


class Dense(Problem):
    """Gradients alone, of any number of rows; the data takes the same memory whatever is used of it."""

    steps = False

    def __init__(self, rows: int, width: int = 256) -> None:
        self.rows, self.width = rows, width

    def model(self) -> nn.Module:
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(self.width, self.width), nn.GELU())))

    def batch(self) -> Batch:
        return (torch.randn(8 * 1024, self.width)[: self.rows],)

    def loss(self, model: nn.Module, piece: Batch) -> Any:
        return model(piece[0]).square().mean()


PROBLEMS = {"gpt": GPT, "ragged": Ragged, "tiny": Tiny, "images": Images, "dense": Dense}
