"""The run in PyTorch: one `Accumulator.step` per optimizer step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .. import Mean
from .._report import Report
from ..torch import Accumulator, check, evaluate, plan, token_mean
from ..torch._agree import is_out_of_memory
from .backend import BETAS, DECAY, EPS, Planned, State, Stepped, planned
from .ranks import Ranks
from .sampling import DROPOUT, Rows, random_of
from .settings import Settings
from .torch_memory import Peak
from .torch_model import GPT
from .weights import initial, is_decayed

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

STEPS_TO_WATCH = 2
"""For their memory: the second has the optimizer's moments, and the others are like it."""


class TorchBackend:
    """A GPT with AdamW, on the GPU if there is one.

    Args:
        settings: of the run.
        vocabulary: how many tokens there are.
        ranks: the processes that share each batch.
    """

    def __init__(self, settings: Settings, vocabulary: int, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks
        self.device = f"cuda:{ranks.local_rank}" if torch.cuda.is_available() else "cpu"
        dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        self._model = GPT(settings, vocabulary).to(self.device, dtype)
        self._named = dict(self._model.named_parameters())
        self._set_weights(initial(settings, vocabulary))
        decayed = [p for name, p in self._named.items() if is_decayed(name, p)]
        others = [p for name, p in self._named.items() if not is_decayed(name, p)]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
        self._scaler = (
            torch.amp.GradScaler(self._model.norm.weight.device.type) if settings.precision == "fp16" else None
        )
        self._trained = self._model if ranks.size == 1 else nn.parallel.DistributedDataParallel(self._model)
        self._accumulator = Accumulator(self._trained, micro_batch_size=settings.micro_batch_size or "auto")
        self._peak, self._steps = Peak(), 0
        self.use(settings.micro_batch_size or 1)

    def use(self, micro_batch_size: int) -> None:
        self._accumulator.micro_batch_size = micro_batch_size

    @property
    def micro_batch_size(self) -> int:
        assert self._accumulator.micro_batch_size is not None
        return self._accumulator.micro_batch_size

    def step(self, rows: Rows, step: int, learning_rate: float) -> Stepped:
        if self._settings.dropout:
            random = random_of(self._settings.seed, DROPOUT, step * self._ranks.size + self._ranks.rank)
            torch.manual_seed(int(random.integers(1 << 63)))
        share = np.array_split(rows, self._ranks.size)[self._ranks.rank]
        planned = self.micro_batch_size
        with self._a_step(learning_rate):
            result = self._accumulator.step(
                self._loss_fn(self._trained),
                torch.from_numpy(share),
                self._optimizer,
                max_norm=self._settings.max_norm,
                scaler=self._scaler,
            )
        if self.micro_batch_size != planned:  # in all ranks, but half of unequal shares need not be equal
            self.use(self._ranks.from_first(lambda: self.micro_batch_size))
        assert result.grad_norm is not None
        return Stepped(result.loss.item(), result.grad_norm.item(), result.stepped)

    def plain_step(self, pieces: Sequence[Rows], step: int, learning_rate: float) -> None:
        with self._a_step(learning_rate):
            loss_fn = self._loss_fn(self._model)
            for piece in pieces:
                loss = loss_fn(torch.from_numpy(piece).to(self.device)).value / len(pieces)
                (self._scaler.scale(loss) if self._scaler else loss).backward()
            if self._scaler:
                self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_norm)
            if self._scaler:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            else:
                self._optimizer.step()
            self._optimizer.zero_grad()

    def ran_out(self, error: Exception) -> bool:
        return is_out_of_memory(error)

    def evaluate(self, rows: Rows) -> float:
        pieces = torch.from_numpy(rows).split(self.micro_batch_size)
        return evaluate(self._model, self._loss_fn(self._model), pieces).loss.item()

    @torch.no_grad()
    def logits(self, tokens: Rows) -> npt.NDArray[np.floating]:
        self._model.eval()
        scores: Tensor = self._model(torch.from_numpy(tokens).to(self.device))[0]
        self._model.train()
        return scores.double().cpu().numpy()

    def check(self, rows: Rows) -> Report:
        self._model.eval()  # dropout draws other numbers for other pieces
        report = check(self._model, self._loss_fn(self._model), torch.from_numpy(rows))
        self._model.train()
        return report

    def plan(self, rows: Rows, memory: int) -> Planned:
        model = self._trained
        whole = plan(model, self._loss_fn(model), torch.from_numpy(rows), memory=memory, optimizer=self._optimizer)
        return planned(whole, self._settings.micro_batch_size)

    def peak_memory(self) -> int | None:
        return self._peak.bytes

    @contextmanager
    def _a_step(self, learning_rate: float) -> Iterator[None]:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._steps += 1
        with self._peak.watching(self._held) if self._steps <= STEPS_TO_WATCH else nullcontext():
            yield

    def _held(self) -> int:
        """Bytes of the weights and of the optimizer's moments."""
        moments = [
            moment for kept in self._optimizer.state.values() for moment in (kept["exp_avg"], kept["exp_avg_sq"])
        ]
        return sum(tensor.nbytes for tensor in (*self._named.values(), *moments))

    def state(self) -> State:
        weights = {name: _array(parameter) for name, parameter in self._named.items()}
        moments: dict[str, Any] = {}
        taken = 0
        for name, parameter in self._named.items():
            if kept := self._optimizer.state.get(parameter):
                moments |= {f"first.{name}": _array(kept["exp_avg"]), f"second.{name}": _array(kept["exp_avg_sq"])}
                taken = int(kept["step"])
        scaler = self._scaler.state_dict() if self._scaler else None
        return State(weights, moments, {"steps_taken": taken, "scaler": scaler})

    def load(self, state: State) -> None:
        self._set_weights(state.weights)
        self._optimizer.state.clear()
        for name, parameter in self._named.items():
            if f"first.{name}" in state.moments:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(state.scalars["steps_taken"])),
                    "exp_avg": _tensor(state.moments[f"first.{name}"], self.device),
                    "exp_avg_sq": _tensor(state.moments[f"second.{name}"], self.device),
                }
        if self._scaler:
            self._scaler.load_state_dict(state.scalars["scaler"])

    def _loss_fn(self, model: nn.Module) -> Any:
        dtype = AUTOCAST.get(self._settings.precision)

        def loss_fn(rows: Tensor) -> Mean:
            with torch.autocast(rows.device.type, dtype=dtype) if dtype else nullcontext():
                scores = model(rows[:, :-1])
            return token_mean(scores, rows[:, 1:], shift=False)

        return loss_fn

    @torch.no_grad()
    def _set_weights(self, weights: dict[str, Any]) -> None:
        for name, parameter in self._named.items():
            parameter.copy_(_tensor(weights[name], self.device))


make = TorchBackend


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _tensor(array: npt.NDArray[Any], device: str) -> Tensor:
    return torch.from_numpy(array).to(device, copy=True)
