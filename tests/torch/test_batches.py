"""Cut: structures, what goes whole to each piece, windows, and pieces on the model's device."""

from collections import defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from reference import assert_exact
from wholebatch import BatchError, Mean, OptionError, OptionTypeError
from wholebatch.torch import Accumulator, Window, backward, windows
from wholebatch.torch._cut import Cut, spread_rows, to_device
from wholebatch.torch._tree import map_tensors, tensors


def pieces_of(batch: Any, **cut: int) -> list[Any]:
    return [piece for piece, _ in Cut(batch, cut.get("micro_batch_size"), cut.get("num_micro_batches"))]


def test_what_has_no_rows_goes_whole_to_each_piece():
    config = object()
    batch = {"x": torch.arange(3), "temperature": torch.tensor(0.5), "name": "a", "config": config, "n": None}
    pieces = pieces_of(batch, micro_batch_size=1)
    assert [piece["x"].tolist() for piece in pieces] == [[0], [1], [2]]
    for piece in pieces:
        assert piece["temperature"] is batch["temperature"]
        assert piece["config"] is config
        assert (piece["name"], piece["n"]) == ("a", None)


def test_pieces_are_views_of_the_batch():
    x = torch.arange(6.0)
    for piece in pieces_of(x, micro_batch_size=2):
        assert piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_container_without_tensors_is_passed_on_as_it_is():
    @dataclass
    class Settings:
        seen: list = field(default_factory=list)

    settings = Settings()
    assert all(piece[1] is settings for piece in pieces_of((torch.ones(2), settings), micro_batch_size=1))


@dataclass
class Derived:
    x: torch.Tensor
    rows: int = field(init=False)

    def __post_init__(self):
        self.rows = len(self.x)


@pytest.mark.parametrize(
    ("batch", "look"),
    [
        (BatchEncoding({"x": torch.arange(4)}), lambda piece: piece["x"]),
        (BaseModelOutput(last_hidden_state=torch.arange(4)), lambda piece: piece.last_hidden_state),
        (defaultdict(list, x=torch.arange(4)), lambda piece: piece["x"]),
        (Derived(torch.arange(4)), lambda piece: piece.x),
        (torch.nn.utils.parametrize.ParametrizationList, None),
    ],
    ids=["tokenizer's batch", "model output", "defaultdict", "field without init", "no container"],
)
def test_containers_keep_their_type(batch, look):
    if look is None:
        assert map_tensors(torch.clone, batch) is batch
        return
    for i, piece in enumerate(pieces_of(batch, micro_batch_size=2)):
        assert type(piece) is type(batch)
        assert look(piece).tolist() == [2 * i, 2 * i + 1]
    assert look(batch).tolist() == [0, 1, 2, 3], "the batch itself is untouched"


def test_a_mapping_that_cannot_be_written_becomes_a_dict():
    (piece,) = pieces_of(MappingProxyType({"x": torch.ones(2)}))
    assert piece is not None
    assert type(pieces_of(MappingProxyType({"x": torch.ones(2)}), micro_batch_size=1)[0]) is dict


def test_paths_name_every_tensor():
    batch = {"ids": torch.ones(2), "pair": (torch.ones(2), [torch.ones(2)]), "data": Derived(torch.ones(2))}
    assert [path for path, _ in tensors(batch)] == [
        'batch["ids"]',
        'batch["pair"][0]',
        'batch["pair"][1][0]',
        'batch["data"].x',
    ]


def test_pieces_are_moved_to_the_models_device_one_at_a_time():
    batch = {"x": torch.ones(4, 2), "t": torch.tensor(1.0), "s": "whole"}
    device = torch.device("meta")
    moved = to_device(batch, device)
    assert moved["x"].device == moved["t"].device == device
    assert to_device(moved, device) is moved
    assert to_device(batch, None) is batch


def test_rows_that_differ_are_named():
    with pytest.raises(BatchError, match=r'batch rows differ: batch\["ids"\] has 8, batch\["labels"\] has 7'):
        backward(make_model(), lambda b: None, {"ids": torch.ones(8), "labels": torch.ones(7)})


@pytest.mark.parametrize("batch", [{}, {"text": ["a", "b"]}, torch.tensor(1.0), None, [1, 2]])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(BatchError, match="no tensor with rows in the batch"):
        backward(make_model(), lambda b: None, batch)


def test_an_empty_batch_is_refused():
    with pytest.raises(BatchError, match="the batch is empty"):
        backward(make_model(), lambda b: None, (torch.ones(0, 4), torch.ones(0)))


# Windows


def test_windows_group_a_loader_of_unknown_length():
    grouped = list(windows((i for i in range(7)), 3))
    assert [list(window) for window in grouped] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(isinstance(window, Window) for window in grouped)
    assert list(windows([], 3)) == []


def test_a_window_is_a_sequence():
    window = Window("abc")
    assert (len(window), window[0], list(window[1:])) == (3, "a", ["b", "c"])
    assert isinstance(window[1:], Window)
    assert repr(window) == "Window of 3 micro-batches"


@pytest.mark.parametrize(("size", "error"), [(0, OptionError), (-1, OptionError), (1.5, OptionTypeError)])
def test_windows_refuse_their_size_at_once(size, error):
    with pytest.raises(error, match="size must be"):
        windows([1], size)


def test_windows_pass_on_what_a_loader_raises():
    def loader():
        yield 1
        raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError, match="disk gone"):
        list(windows(loader(), 2))


def test_a_list_of_micro_batches_is_told_about_windows():
    x, _ = make_data()
    with pytest.raises(BatchError, match=r"batch\[1\] has 3; a list of micro-batches is given as Window"):
        backward(make_model(), lambda piece: pytest.fail("called"), [x, x[:3]])


def test_an_empty_window_is_refused():
    with pytest.raises(BatchError, match="an empty Window"):
        Window([])


def test_a_window_is_empty_only_if_all_of_it_is():
    model, (x, y) = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)((x, y)))
    backward(model, make_loss(model), Window([(x[:0], y[:0]), (x, y)]))
    assert_exact(take_gradients(model), whole)
    with pytest.raises(BatchError, match="the batch is empty: the pieces of the Window have 0 rows"):
        backward(model, make_loss(model), Window([(x[:0], y[:0]), (x[:0], y[:0])]))


@pytest.mark.parametrize("sizes", [[4, 4, 2], [1, 9], [10], [3, 3, 3, 1]])
def test_a_window_is_scaled_by_what_it_holds(sizes):
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x, y)))
    window = Window(zip(x.split(sizes), y.split(sizes), strict=True))
    result = backward(model, loss_fn, window, micro_batch_size=2)
    assert_exact(take_gradients(model), whole)
    assert (result.rows, result.num_micro_batches) == (10, len(sizes))


def test_pieces_of_a_window_may_be_anything():
    model, (x, y) = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)((x, y)))

    def loss_fn(indices):
        loss = nn_sum(model(x[list(indices)]), y[list(indices)])
        return Mean(loss, len(indices))

    nn_sum = torch.nn.CrossEntropyLoss(reduction="sum")
    result = backward(model, loss_fn, Window([range(7), range(7, 10)]))
    assert_exact(take_gradients(model), whole)
    assert result.rows is None
    assert result.count == 10


def test_a_scalar_loss_needs_rows_in_a_window_too():
    with pytest.raises(ValueError, match="the rows of this piece are not known: return Mean"):
        backward(make_model(), lambda indices: torch.zeros((), requires_grad=True), Window([range(7)]))


def test_a_window_may_hold_a_piece_without_rows():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x, y)))
    result = backward(model, loss_fn, Window([(x[:0], y[:0]), (x, y)]))
    assert_exact(take_gradients(model), whole)
    assert torch.isfinite(result.loss)


def test_loose_parameters_and_several_modules_are_models():
    body, head = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 3).double()
    both = torch.nn.Sequential(body, head)
    data = make_data()
    whole = whole_gradients(both, lambda: make_loss(both)(data))
    for model in (
        [body, head],
        (body, head),
        both.parameters(),
        [body, *head.parameters()],
        {"a": body, "b": head}.values(),
    ):
        Accumulator(model, micro_batch_size=3).backward(make_loss(both), data)
        assert_exact(take_gradients(both), whole)


@pytest.mark.parametrize("model", [None, 3, "model", [], [1, 2], torch.ones(2)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="model must be a module, several modules or an iterable of parameters"):
        Accumulator(model)


class Wrapping(MutableMapping):
    """A mapping whose copy shares its storage."""

    def __init__(self, **items):
        self.items_inside = items

    def __getitem__(self, key):
        return self.items_inside[key]

    def __setitem__(self, key, value):
        self.items_inside[key] = value

    def __delitem__(self, key):
        del self.items_inside[key]

    def __iter__(self):
        return iter(self.items_inside)

    def __len__(self):
        return len(self.items_inside)


class Attributes(dict):
    """A dict whose items are attributes too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def test_a_mapping_whose_copy_shares_its_storage_is_not_written_to():
    batch = Wrapping(x=torch.arange(4), y=torch.arange(4))
    pieces = pieces_of(batch, micro_batch_size=2)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3]]
    assert batch["x"].tolist() == batch["y"].tolist() == [0, 1, 2, 3]


def test_attributes_that_mirror_items_are_cut_with_them():
    for piece in pieces_of(Attributes(x=torch.arange(4)), micro_batch_size=2):
        assert len(piece.x) == len(piece["x"]) == 2


@pytest.mark.parametrize(("rows", "spread"), [(1, [0]), (3, [0, 4, 9]), (10, list(range(10)))])
def test_rows_can_be_spread_over_a_batch(rows, spread):
    batch = {"x": torch.arange(10) + 1, "scale": torch.tensor(2.0)}  # a 0 might be masked, which is looked for
    part = spread_rows(batch, rows)
    assert (part["x"] - 1).tolist() == spread
    assert part["scale"] is batch["scale"]
