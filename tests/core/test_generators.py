"""Random generators are found where a function reaches them, and put back."""

import functools
import random

import numpy as np
import pytest

from wholebatch._generators import PythonGenerators, kept_generators

OF_MODULE = np.random.default_rng(1)


def names_a_global():
    return [OF_MODULE.random() for _ in range(3)]


class Holder:
    def __init__(self, *held):
        self.held = held

    def method(self):
        return names_a_global()

    def __call__(self):
        return 0


ONE = random.Random(0)

FUNCTIONS = {
    "a closure": (lambda one=ONE: lambda: one.random())(),
    "a default": lambda one=ONE: one.random(),
    "an attribute": Holder([{"a": ONE}]),
    "a method": Holder(ONE).__call__,
    "a partial": functools.partial(max, ONE),
    "a function in a list": [lambda one=ONE: one.random()],
}


@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_generator_is_found(fun):
    assert ONE in kept_generators(fun)


def test_the_globals_that_functions_and_methods_name_are_found():
    assert kept_generators(names_a_global) == [OF_MODULE]
    assert kept_generators(Holder()) == [OF_MODULE]
    assert kept_generators(lambda: 0, Holder, random.SystemRandom()) == []


def test_what_refuses_to_be_looked_at_is_left_alone():
    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("outside of its context")

    found = kept_generators([Proxy()], lambda one=ONE: one)
    assert found == [ONE]


def test_what_is_endless_comes_to_an_end():
    ring = []
    ring.append(ring)
    assert kept_generators(ring) == []

    def before_it_is_there():
        return later

    assert kept_generators(before_it_is_there) == []
    later = ONE
    assert kept_generators(before_it_is_there) == [ONE]


@pytest.mark.parametrize("kept", [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)])
def test_generators_are_put_back(kept):
    generators = PythonGenerators([kept])
    start = generators.now()
    assert not generators.have_moved()
    drawn = kept.random()
    assert generators.have_moved()
    generators.restore()
    assert generators.now() == start
    assert kept.random() == drawn
    generators.restore()
    random.random(), np.random.rand()
    assert generators.have_moved()
    generators.restore()
    assert not generators.have_moved()
