"""The stable form on special values, in JAX (bit for bit) and in NumPy; no parameter of a primitive
is dropped."""

import functools
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stable_values
from jax import lax

from fnet import export, jaxpr
from fnet.export import _evaluate, _stable
from fnet.export.standalone import _interpret

pytestmark = pytest.mark.usefixtures("quickly")
# `make special-values` tests all 2,100 cases.
CASES = [
    pytest.param(key, id=" ".join(key))
    for key in random.Random(0).sample(sorted(stable_values.CASES), 350)
]


@pytest.fixture(autouse=True)
def wide():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("key", CASES)
def test_jax_computes_the_same_bits(key):
    assert stable_values.verdict(key, stable_values.by_jax, exact=True) == "equal"


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("key", CASES)
def test_numpy_computes_the_same(key):
    assert stable_values.verdict(key, stable_values.by_numpy) == "equal"


def test_casts_in_numpy():
    cast = lambda x, dtype: _interpret._converted(
        None, None, [(np.dtype(dtype), np.shape(x))], np.array(x)
    )[0].tolist()
    assert cast(np.float32([1e-40, -0.0, np.nan, 0.5]), "bool") == [False, False, True, True]
    assert cast(np.float32([300, -300, np.nan, 2.9, np.inf]), "int8") == [127, -128, 0, 2, 127]


class Recorded(dict):
    """The options of an operation, which records those that were read."""

    def __init__(self, options, read):
        super().__init__(options)
        self.read = read

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


def bodies(body):
    yield body
    for _, _, _, options, _ in body["equations"]:
        for value in options.values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    yield from bodies(each)


# Options that do not change what NumPy computes. The types of the outputs state the shapes.
BY_NUMPY = {"accuracy", "sorted", "unique", "stable", "shape", "precision"}
BY_JAX = {"shape"}


def traced(program, constants, args):
    jax.make_jaxpr(lambda *args: _evaluate.sized(program, constants, {}).body(program, args))(*args)


@pytest.mark.parametrize("evaluate, unused", [(stable_values.by_numpy, BY_NUMPY), (traced, BY_JAX)])
def test_every_recorded_option_is_read(evaluate, unused):
    read, written, done = {}, {}, set()
    for key in [*stable_values.CASES, *PARAMETERS]:
        if " ".join(key[0].split()[:2]) in done:
            continue
        done.add(" ".join(key[0].split()[:2]))
        program, constants, args = stable_values.stable(key, PARAMETERS)
        for body in bodies(program):
            for equation in body["equations"]:
                operation = equation[0]
                written.setdefault(operation, set()).update(equation[3])
                equation[3] = Recorded(equation[3], read.setdefault(operation, set()))
        evaluate(program, constants, args)
    read["scatter_apply"] |= read["scatter"]  # one function reads the options of both
    written["size"] = {"value"}  # of an axis with a symbolic size, in test_bundles.py
    read["size"] = {"value"}
    assert set(written) == set(_evaluate.OPERATIONS) == set(_interpret.OPERATIONS)
    unread = {
        operation: names
        - read[operation]
        - unused
        - ({"sizes"} if operation == "dynamic_slice" else set())
        for operation, names in written.items()
    }
    assert not {operation: names for operation, names in unread.items() if names}


X = np.linspace(0.1, 2, 12, dtype=np.float32).reshape(3, 4)
PLACES = np.array([2, 0], np.int32)
# Parameters that few programs set: (operation, parameter) -> (function, arguments).
PARAMETERS = {
    ("exp", "mode"): (lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), [X]),
    ("tanh", "tolerance"): (lambda x: lax.tanh(x, accuracy=lax.Tolerance(1e-5, 1e-6, 2)), [X]),
    ("dot", "precision"): (lambda x: lax.dot(x, x.T, precision="highest"), [X]),
    ("dot", "two"): (lambda x: lax.dot(x, x.T, precision=("high", "default")), [X]),
    ("dot", "algorithm"): (
        lambda x: lax.dot(x, x.T, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        [X],
    ),
    ("dot", "result"): (
        lambda x: lax.dot(
            x.astype(jnp.int8), x.T.astype(jnp.int8), preferred_element_type=jnp.int32
        ),
        [X],
    ),
    ("convolution", "precision"): (
        lambda x: lax.conv_general_dilated(
            x[None], x[:1, None, :3] * jnp.ones((2, 3, 1), x.dtype), (1,), "SAME", precision="high"
        ),
        [X],
    ),
    ("gather", "promises"): (
        lambda x, i: x.at[i].get(unique_indices=True, indices_are_sorted=True),
        [X, PLACES[::-1]],
    ),
    ("scatter", "promises"): (lambda x, i: x.at[i].add(1.0, unique_indices=True), [X, PLACES]),
    ("scatter", "apply"): (lambda x, i: x.at[i].apply(jnp.exp, unique_indices=True), [X, PLACES]),
}


@pytest.mark.parametrize("key", [pytest.param(key, id=" ".join(key)) for key in PARAMETERS])
def test_equations_have_the_recorded_parameters(key):
    """What `jax.make_jaxpr` shows of a rebuilt program is what it shows of the program."""
    program, constants, args = stable_values.stable(key, PARAMETERS)
    rebuilt = jax.make_jaxpr(
        lambda *args: _evaluate.sized(program, constants, {}).body(program, args)
    )(*args)
    wanted = jaxpr.inlined(
        jax.make_jaxpr(lambda *args: jax.tree.leaves(PARAMETERS[key][0](*args)))(*args)
    )
    parameters = lambda closed: [
        (eqn.primitive.name, {name: str(value) for name, value in eqn.params.items()})
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name.split("-")[0]
        in ("exp", "tanh", "dot_general", "conv_general_dilated", "gather", "scatter")
    ]
    plain = lambda text: [
        (
            name,
            {
                k: v.partition(" at 0x")[0]
                for k, v in params.items()
                if k != "mode" and not (k == "fill_value" or k == "preferred_element_type")
            },
        )
        for name, params in text
    ]
    assert plain(parameters(rebuilt)) == plain(parameters(wanted))


def test_an_unknown_parameter_is_an_error(monkeypatch):
    monkeypatch.delitem(_stable._IRRELEVANT, "weak_type")
    closed = jax.make_jaxpr(lambda x: x.astype(jnp.int32))(X)
    with pytest.raises(
        _stable.Unsupported,
        match=r"'convert_element_type'.*its parameter 'weak_type' is unknown to this version of fnet",
    ):
        _stable.stable(closed)


@pytest.mark.parametrize("start", [-(2**31), -7, -5, -1, 0, 4, 2**31 - 1])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: lax.dynamic_slice(x, (i,), (2,)),
        lambda x, i: lax.dynamic_update_slice(x, -x[:2], (i,)),
        lambda x, i: lax.dynamic_slice(x, (i,), (2,), allow_negative_indices=False),
    ],
    ids=["slice", "update", "as is"],
)
def test_a_negative_start_is_counted_from_the_end_once(f, start):
    x, i = np.arange(1, 6, dtype=np.float32), np.int32(start)
    closed = jax.make_jaxpr(lambda *args: [f(*args)])(x, i)
    program, constants = _stable.stable(closed)
    for evaluate in stable_values.by_jax, stable_values.by_numpy:
        np.testing.assert_array_equal(evaluate(program, constants, [x, i])[0], jax.jit(f)(x, i))


def test_a_function_applied_by_a_scatter(tmp_path):
    program = export.program(
        lambda params, x, i: x.at[i].apply(jnp.exp),
        {},
        x=export.spec("n", "float32"),
        i=export.spec("2", "int32"),
    )
    program.save(tmp_path / "f")
    export.renew(tmp_path / "f", tmp_path / "g")
    x, i = np.arange(6, dtype=np.float32), np.array([1, -2], np.int32)
    wanted = np.where(np.isin(np.arange(6), [1, 4]), np.exp(x), x)
    for bundle in export.load(tmp_path / "f"), export.load(tmp_path / "g"):
        for got in bundle(x, i), bundle.interpret("predict", x, i):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


@functools.cache
def primitives():
    """The primitives of all cases."""
    found = {}
    for key in [*stable_values.CASES, *PARAMETERS]:
        f, args = {**stable_values.CASES, **PARAMETERS}[key]
        closed = jaxpr.flatten(jax.make_jaxpr(f)(*args))
        found |= {eqn.primitive.name: key for eqn in jaxpr.equations(closed.jaxpr)}
    return found


@pytest.mark.exhaustive
def test_the_cases_have_every_primitive():
    assert set(_stable._OPTIONS) - set(primitives()) == {"dim_as_value"}
