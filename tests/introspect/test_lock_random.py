"""Locks of random programs: other orders, names and ways to write them change nothing, and any
changed statement is noticed, in its layer."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fnet import introspect

X = jnp.ones((5, 5))
NAMES = "a", "b", "c"
ONE = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "transpose": jnp.transpose,
    "neg": jnp.negative,
    "reverse": lambda x: x[::-1],
    "softmax": jax.nn.softmax,
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "scan": lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c + r), x[0], x)[1],
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda y: y * 2, x),
}
TWO = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "sub": jnp.subtract,
    "dot": jnp.dot,
    "max": jnp.maximum,
    "where": lambda a, b: jnp.where(a > b, a, b * 2),
    "concatenate": lambda a, b: jnp.concatenate([a, b])[1:6],
}
NUMBER = {"plus": lambda x, c: x + c, "times": lambda x, c: x * c}


def statements(rng, count):
    """Statements (operation, operands, number or None); operand i is input i, or statement i - 3."""
    found = []
    for i in range(count):
        table = rng.choice([ONE, ONE, TWO, TWO, NUMBER])
        number = rng.choice([0.5, 1.5, 2.0, 1e-5]) if table is NUMBER else None
        operands = [rng.randrange(i + 3) for _ in range(2 if table is TWO else 1)]
        found.append((rng.choice(list(table)), operands, number))
    return found


def program(found, results, *, gradient, order=None, names=NAMES, swap=False, jitted=()):
    def f(inputs):
        values = dict(enumerate(inputs[name] for name in names))
        for i in order or range(len(found)):
            name, operands, number = found[i]
            arrays = [values[j] for j in operands]
            if swap and name in ("add", "mul"):
                arrays = arrays[::-1]
            arrays += [] if number is None else [number]
            operation = (ONE | TWO | NUMBER)[name]
            with jax.named_scope(f"s{i}"):
                values[i + 3] = (jax.jit(operation) if i in jitted else operation)(*arrays)
        return [values[i] for i in results]

    if not gradient:
        return f
    return jax.value_and_grad(lambda inputs: sum(jnp.square(y).sum() for y in f(inputs)))


def locked(f, names=NAMES):
    return introspect.lock(f, dict.fromkeys(names, X), values=False)


def shuffled(rng, found):
    """Another order of the statements in which each still follows its operands."""
    left, done, order = set(range(len(found))), {0, 1, 2}, []
    while left:
        ready = sorted(i for i in left if done.issuperset(found[i][1]))
        order.append(rng.choice(ready))
        left.remove(order[-1])
        done.add(order[-1] + 3)
    return order


def used(found, results):
    """The statements on which a result depends."""
    seen, waiting = set(), list(results)
    while waiting:
        i = waiting.pop()
        if i >= 3 and i not in seen:
            seen.add(i)
            waiting += found[i - 3][1]
    return sorted(i - 3 for i in seen)


def changed(rng, statement):
    name, operands, number = statement
    if number is not None:
        return name, operands, number * 1.01
    table = ONE if name in ONE else TWO
    return rng.choice([other for other in table if other != name]), operands, None


def cases(first, count):
    for seed in range(first, first + count):
        rng = random.Random(seed)
        found = statements(rng, rng.randint(3, 25))
        results = sorted({rng.randrange(len(found) + 3), len(found) + 2})
        yield rng, found, results, rng.random() < 0.5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_rewritten_programs_are_the_same(first):
    for rng, found, results, gradient in cases(first, 10):
        names = NAMES if rng.random() < 0.5 else ("n_c", "n_a", "n_b")
        jitted = {i for i in range(len(found)) if rng.random() < 0.4}
        other = program(
            found,
            results,
            gradient=gradient,
            order=shuffled(rng, found),
            names=names,
            swap=True,
            jitted=jitted,
        )
        plain = program(found, results, gradient=gradient)
        changes = introspect.diff(locked(plain), locked(other, names))
        assert changes.same, str(changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_a_changed_statement_is_noticed(first):
    elsewhere = 0
    for rng, found, results, gradient in cases(first, 20):
        if not used(found, results):
            continue
        i = rng.choice(used(found, results))
        others = [*found[:i], changed(rng, found[i]), *found[i + 1 :]]
        pair = (program(each, results, gradient=gradient) for each in (found, others))
        changes = introspect.diff(*map(locked, pair))
        assert not changes.same
        # A value that two statements compute has the layer of one of them.
        elsewhere += changes.first.layer != f"s{i}"
    assert elsewhere <= 2
