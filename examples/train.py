"""Train a small GPT on the source of Python's standard library, with a batch larger than what is in memory at once.

    python examples/train.py [--steps N] [--batch-size N] [--micro-batch-size N]

About half a minute on two cores. Nothing is downloaded.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from wholebatch.torch import Accumulator, check

WIDTH, LAYERS, HEADS, LENGTH, BYTES = 128, 3, 4, 96, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text() -> Tensor:
    """The top level of the standard library, as bytes in a fixed order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def sample(text: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    text, model = read_text(), GPT()
    held_out = sample(text[-100_000:], 64, generator)
    text = text[:-100_000]

    def loss_fn(rows: Tensor) -> Tensor:
        logits = model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def validate() -> float:
        with torch.no_grad():
            return loss_fn(held_out).item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps, pct_start=0.1)
    accumulator = Accumulator(model, micro_batch_size=options.micro_batch_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"GPT with {parameters:,} parameters, {len(text):,} bytes of text")
    print(f"batch of {options.batch_size} rows, {options.micro_batch_size} of them in memory at a time")

    before, start = validate(), time.perf_counter()
    for step in range(1, options.steps + 1):
        batch = sample(text, options.batch_size, generator)
        result = accumulator.step(loss_fn, batch, optimizer, max_norm=1.0, scheduler=scheduler)
        if step % 10 == 0 or step == 1:
            print(f"step {step:4d}   loss {result.loss:.3f}   gradient norm {result.grad_norm:.2f}")
    seconds = time.perf_counter() - start

    report = check(model, loss_fn, held_out, micro_batch_size=options.micro_batch_size)
    rate = options.steps * options.batch_size * LENGTH / seconds
    print(f"\nvalidation loss {before:.3f} -> {validate():.3f} in {seconds:.0f} s ({rate:,.0f} bytes/s)")
    print(f"each step used the gradient of all {options.batch_size} rows, exact: {'yes' if report.exact else 'NO'}")
    print(f"(largest difference from the unsplit batch, in float64: {report.error:.0e} of the largest entry)")


if __name__ == "__main__":
    main()
