"""What the tests of a run share: the smallest model, and what lies in its folder."""

import json
from pathlib import Path

from wholebatch.pretrain.settings import option

SMALLEST = {
    "tokenizer": "bytes",
    "width": 8,
    "layers": 1,
    "heads": 2,
    "seq_len": 8,
    "batch_size": 5,
    "micro_batch_size": 2,
}
TINY = [word for name, value in SMALLEST.items() for word in (option(name), str(value))]
STEPS = ["--steps", "6", "--checkpoint-every", "2", "--validate-every", "3"]


def write_text(path: Path) -> Path:
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(60)))
    return path


PLANS: dict = {}


def remember_plans(monkeypatch, backend):
    """What a plan says depends on sizes alone, and takes longer than all the rest: each is found once."""
    real = backend.plan

    def plan(self, rows, memory):
        settings = self._settings
        sizes = (backend, rows.shape, memory, settings.width, settings.micro_batch_size, settings.precision)
        if sizes not in PLANS:
            PLANS[sizes] = real(self, rows, memory)
        return PLANS[sizes]

    monkeypatch.setattr(backend, "plan", plan)


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def weights(folder: Path) -> bytes:
    """The newest checkpoint's, as they lie on the disk."""
    return (newest(folder) / "weights.safetensors").read_bytes()


def everything(folder: Path) -> dict[str, bytes]:
    """Weights and optimizer of the newest checkpoint."""
    return {name: (newest(folder) / f"{name}.safetensors").read_bytes() for name in ("weights", "optimizer")}


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
