"""Two models in one step, a GAN, before and after.

Each player has an accumulator. The generator's loss passes through the critic, whose gradients from it are thrown away.
"""

import torch
from bare import difference
from torch import nn

from wholebatch.torch import Accumulator

ROWS, MICRO_BATCH, STEPS = 30, 8, 5


def make_players() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    return generator, critic


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(ROWS, 2, generator=source, dtype=torch.float64) + 2,
            torch.randn(ROWS, 4, generator=source, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


def score(critic: nn.Module, samples: torch.Tensor, wanted: float) -> torch.Tensor:
    scores = critic(samples)
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


def before() -> nn.Module:
    generator, critic = make_players()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for real, noise in make_batches():
        critic_optimizer.zero_grad()
        (score(critic, real, 1.0) + score(critic, generator(noise).detach(), 0.0)).backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        score(critic, generator(noise), 1.0).backward()
        generator_optimizer.step()
    return nn.ModuleList([generator, critic])


def after() -> nn.Module:
    generator, critic = make_players()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for_critic = Accumulator(critic, micro_batch_size=MICRO_BATCH)
    for_generator = Accumulator(generator, micro_batch_size=MICRO_BATCH)

    def critic_loss(piece: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        real, noise = piece
        return {"real": score(critic, real, 1.0), "fake": score(critic, generator(noise).detach(), 0.0)}

    def generator_loss(piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        _, noise = piece
        return score(critic, generator(noise), 1.0)

    for batch in make_batches():
        critic_optimizer.zero_grad()
        for_critic.step(critic_loss, batch, critic_optimizer)
        for_generator.step(generator_loss, batch, generator_optimizer)
    return nn.ModuleList([generator, critic])


if __name__ == "__main__":
    print(f"weights of cut and whole batches differ by {difference(after(), before()):.1e}")
