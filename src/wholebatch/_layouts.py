"""Other ways in which the arrays of a batch may hold its rows, for finding out that they do.

A layout says for each array along which axis its rows lie, None for one that is no part of the rows.
"""

from collections.abc import Iterator, Mapping

Layout = dict[str, int | None]
"""The axis of the rows, by the array's path."""


def other_layouts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Layout]]:
    """Layouts besides the usual one, likely ones first, with what is different about them in words.

    Args:
        shapes: of the arrays that are cut, by path.

    >>> [what for what, _ in other_layouts({"x": (5, 8, 3), "scale": (5,)})]
    ['x is not per row', 'scale is not per row', 'rows lie on axis 1 of x', 'rows lie on axis 2 of x']
    """
    usual: Layout = dict.fromkeys(shapes, 0)
    if len(shapes) > 1:
        for path in shapes:
            yield f"{path} is not per row", {**usual, path: None}
    deepest = max((len(shape) for shape in shapes.values()), default=0)
    for axis in range(1, min(deepest, 4)):
        moved = [path for path, shape in shapes.items() if len(shape) > axis]
        lengths = {shapes[path][axis] for path in moved}
        if len(lengths) == 1 and lengths != {1}:
            (rows,) = lengths
            others: Layout = {path: 0 if shape[0] == rows else None for path, shape in shapes.items()}
            yield f"rows lie on axis {axis} of {', '.join(moved)}", {**others, **dict.fromkeys(moved, axis)}
        for path in moved if len(shapes) > 1 else []:
            if shapes[path][axis] == shapes[path][0] and len(moved) > 1:
                yield f"rows lie on axis {axis} of {path}", {**usual, path: axis}
