"""What a program sends, read from its text."""

import jax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from wholebatch.jax import collectives


def compiled(fun, *args):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*args or (jnp.ones((16, 4)),)).compile()


def all_to_all(x):
    return lax.all_to_all(x, "data", 0, 0)


def permute(x):
    return lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])


KINDS = {
    "all-reduce": lambda x: lax.psum(x, "data"),
    "all-gather": lambda x: lax.all_gather(x, "data").sum(0),
    "reduce-scatter": lambda x: lax.psum_scatter(x, "data").repeat(4),
    "all-to-all": all_to_all,
    "collective-permute": permute,
}


@pytest.mark.parametrize(("kind", "fun"), KINDS.items(), ids=KINDS)
def test_each_kind_is_counted_by_its_name(kind, fun):
    found = collectives(compiled(fun))
    assert found.outside == {kind: 1}
    assert not found.inside


def in_scan(x):
    return lax.scan(lambda total, row: (total + lax.psum(row, "data"), None), x[0], x)[0][None]


def in_while(x):
    return lax.while_loop(lambda y: lax.psum(y, "data").sum() < 9, lambda y: y + 1, x)


def in_branch(x):
    def body(total, row):
        return lax.cond(row[0] > 0, lambda: total + permute(row), lambda: total - permute(row)), None

    return lax.scan(body, x[0], x)[0][None]


def two_deep(x):
    return lax.scan(lambda total, _: (total + in_scan(x), None), x[:1], None, length=3)[0]


@pytest.mark.parametrize(
    ("fun", "inside"),
    [
        (in_scan, {"all-reduce": 1}),
        (in_while, {"all-reduce": 1}),
        (in_branch, {"collective-permute": 2}),
        (two_deep, {"all-reduce": 1}),
    ],
)
def test_loops_are_told_apart_with_all_that_they_call(fun, inside):
    found = collectives(compiled(fun))
    assert found.inside == inside
    assert not found.outside


def test_both_together():
    found = collectives(compiled(lambda x: lax.psum(in_scan(x), "data") + in_branch(x)))
    assert found.inside == {"all-reduce": 1, "collective-permute": 2}
    assert found.outside == {"all-reduce": 1}
    assert found.total == {"all-reduce": 2, "collective-permute": 2}
    assert found.outside["all-gather"] == 0


def test_a_collective_of_many_arrays_is_one():
    many = compiled(lambda x: lax.psum((x, 2 * x, x[0]), "data")[0])
    assert collectives(many).outside == {"all-reduce": 1}


class Text:
    """A program as other backends write it."""

    def __init__(self, *lines):
        self._lines = lines

    def as_text(self):
        return "\n".join(["HloModule jit_step, is_scheduled=true", "", *self._lines])


def test_a_collective_with_a_start_and_an_end_is_one():
    program = Text(
        "%add (a: f32[], b: f32[]) -> f32[] {",
        "  ROOT %sum = f32[] add(%a, %b)",
        "}",
        "",
        "ENTRY %main.9 (p: f32[8]) -> f32[8] {",
        "  %p = f32[8]{0} parameter(0)",
        "  %all-reduce-start = f32[8]{0} all-reduce-start(%p), channel_id=1, to_apply=%add",
        "  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)",
        "  %start = ((f32[8]{0}), f32[32]{0}) all-gather-start(%all-reduce-done), dimensions={0}",
        "  ROOT %done = f32[32]{0} all-gather-done(%start)",
        "}",
    )
    assert collectives(program).outside == {"all-reduce": 1, "all-gather": 1}


def test_a_collective_in_a_computation_of_its_own_is_found_where_that_is_called():
    program = Text(
        "%wrapped (q: f32[8]) -> f32[2] {",
        "  ROOT %rs.1 = f32[2]{0} reduce-scatter(%q), channel_id=1, dimensions={0}, to_apply=%add",
        "}",
        "%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {",
        "  %rs-start = ((f32[8]{0}), f32[2]{0}) async-start(%q), calls=%wrapped",
        "}",
        "%condition (state: (s32[], f32[8])) -> pred[] {",
        "  ROOT %less = pred[] compare(%i, %n), direction=LT",
        "}",
        "%unused (q: f32[8]) -> f32[8] {",
        "  ROOT %ar = f32[8]{0} all-reduce(%q), to_apply=%add",
        "}",
        "%add (a: f32[], b: f32[]) -> f32[] {",
        "  ROOT %sum = f32[] add(%a, %b)",
        "}",
        "ENTRY %main (p: f32[8]) -> f32[8] {",
        '  %loop = (s32[], f32[8]{0}) while(%tuple), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"8"}}',
        "}",
    )
    found = collectives(program)
    assert found.inside == {"reduce-scatter": 1}
    assert not found.outside


@pytest.mark.parametrize(
    "not_compiled",
    [jax.jit(lambda x: x), jax.jit(lambda x: x).lower(1.0), "HloModule"],
    ids=["jitted", "lowered", "text"],
)
def test_what_is_not_compiled_is_refused(not_compiled):
    with pytest.raises(
        TypeError, match=r"compiled must be a compiled program, jax.jit\(fun\).lower\(...\).compile\(\), got"
    ):
        collectives(not_compiled)
