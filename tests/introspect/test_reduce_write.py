"""The code that `introspect.reduce` writes computes what the program computes, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet.introspect._reduce._arrays import literal
from fnet.introspect._reduce._program import traced
from fnet.introspect._reduce._script import Writing

NHWC = ("NHWC", "HWIO", "NHWC")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def scanned(x):
    def step(carry, row):
        return jnp.tanh(carry + row), (carry * 2, row.sum())

    return lax.scan(step, jnp.zeros(x.shape[1:]), x, reverse=True)


def looped(x):
    limit = x.max() * 100
    return lax.while_loop(
        lambda c: (c[1] < 9) & (c[0].max() < limit), lambda c: (c[0] * 1.5, c[1] + 1), (x, 0)
    )


def branched(x):
    return lax.switch(jnp.int32(x.sum() > 0), [jnp.sin, lambda x: x.T.T * 3], x)


def softmax(x):
    return jax.nn.log_softmax(jnp.where(x > 0, x, -jnp.inf), axis=-1)


def attention(x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


def integers(i):
    return i // 3 % 5, i << 2, i & 6, ~i, i.astype(jnp.uint8), i > 2, jnp.sort(i)[::-1]


X, INDICES = draw(4, 6), np.arange(6, dtype=np.int32)
IMAGE, KERNEL = draw(2, 8, 8, 4), draw(3, 3, 4, 6, seed=1)
PROGRAMS = {
    "arithmetic": (lambda x: (2 * x - 1) / (x * x + 3) + x**3 - abs(-x), (X,)),
    "comparisons": (lambda x: (x > 0) | (x <= -1) & (x != 2), (X,)),
    "functions": (
        lambda x: jnp.exp(x) + jnp.log1p(abs(x)) + jnp.sqrt(abs(x)) + jnp.tanh(x) * lax.erf(x),
        (X,),
    ),
    "gelu": (jax.nn.gelu, (X,)),
    "softmax": (softmax, (X,)),
    "gradient of softmax": (jax.grad(lambda x: jax.nn.softmax(x)[:, 0].sum()), (X,)),
    "reductions": (
        lambda x: (x.sum(0), x.max(), x.min(1), jnp.prod(x, 1), x.mean(), x.std(0)),
        (X,),
    ),
    "positions": (
        lambda x: (x.argmax(1), x.argmin(0), jnp.cumsum(x, 1), lax.cummax(x, 0, reverse=True)),
        (X,),
    ),
    "products": (lambda x: (x @ x.T, jnp.einsum("ij,kj->ik", x, x, precision="highest")), (X,)),
    "batched products": (lambda x: jnp.einsum("bij,bkj->bik", x, x), (draw(2, 3, 4),)),
    "shapes": (
        lambda x: (
            x.reshape(2, 12).T[None],
            jnp.stack([x, x]),
            x[:, None],
            jnp.pad(x, ((1, 0), (0, 2))),
        ),
        (X,),
    ),
    "slices": (
        lambda x: (x[1:3, ::2], x[::-1], x.at[1].set(0.0), lax.dynamic_slice(x, (1, 2), (2, 2))),
        (X,),
    ),
    "lookups": (
        lambda x, i: (x[i % 4], jnp.take(x, i, 1), x.at[i % 4].add(1.0), x[i % 4, i]),
        (X, INDICES),
    ),
    "sorting": (lambda x: (jnp.sort(x), jnp.argsort(x, 0), lax.top_k(x, 2)), (X,)),
    "convolution": (conv, (IMAGE, KERNEL)),
    "gradient of a convolution": (jax.grad(lambda x, k: conv(x, k).sum(), (0, 1)), (IMAGE, KERNEL)),
    "grouped": (
        jax.grad(lambda k, x: jnp.square(conv(x, k, feature_group_count=4)).sum()),
        (draw(3, 3, 1, 4), IMAGE),
    ),
    "pooling": (pool, (IMAGE,)),
    "gradient of pooling": (jax.grad(lambda x: jnp.square(pool(x)).sum()), (IMAGE,)),
    "attention": (attention, (draw(1, 5, 2, 4),)),
    "scan": (scanned, (X,)),
    "while": (looped, (X,)),
    "switch": (branched, (X,)),
    "integers": (integers, (INDICES,)),
    "halves": (lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.float16).sum(0), (X,)),
    "keys": (lambda key: jax.random.normal(jax.random.fold_in(key, 3), (4,)), (jax.random.key(7),)),
    "split keys": (
        lambda key: [jax.random.bits(k) for k in jax.random.split(key)],
        (jax.random.key(7),),
    ),
    "dropout": (
        lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0),
        (jax.random.key(1), X),
    ),
    "complex": (lambda x: jnp.fft.fft(x).real + jnp.fft.rfft(x).imag.sum(), (X,)),
    "linear algebra": (lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(4)), (X,)),
    "iota": (
        lambda x: x + jnp.arange(6.0)[None] + lax.broadcasted_iota(jnp.float32, (4, 6), 0),
        (X,),
    ),
    "one hot": (lambda i: jax.nn.one_hot(i, 4, dtype=jnp.float32), (INDICES,)),
    "clip": (
        lambda x: jnp.clip(x, -0.5, 0.5) + jnp.round(x) + jnp.sign(x) + lax.clamp(-1.0, x, 1.0),
        (X,),
    ),
}


BOUND = {
    "slices",
    "gradient of pooling",
    "linear algebra",
}  # no function of jax.numpy or jax.lax traces to one of their equations alone


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_computes_what_the_program_computes(name, tmp_path, monkeypatch):
    f, args = PROGRAMS[name]
    program = traced(f, args)
    written = Writing(program).script(lambda writing: [f"results = {writing.call()}"])
    written.write(tmp_path / "repro.py")
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(written.text, name, "exec"), scope)
    if "data" in scope:
        scope["data"].close()
    expected = program.run()
    got = jax.tree.leaves(scope["results"])
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert ("_p.bind" in written.text) == (name in BOUND)


def test_lines_are_readable():
    program = traced(lambda x: jax.nn.relu(x @ x.T) + 1, (np.ones((2, 3), np.float32),))
    assert Writing(program).script(lambda writing: []).text.splitlines() == [
        "import sys, numpy as np, jax, jax.numpy as jnp",
        "a = np.ones((2, 3), np.float32)",
        "@jax.jit",
        "def f(a):",
        "    b = a.T",
        "    c = a @ b",
        "    d = jnp.maximum(c, 0.0)",
        "    return d + 1.0",
    ]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((2, 3), np.float32), "np.zeros((2, 3), np.float32)"),
        (np.ones(4, np.int32), "np.ones(4, np.int32)"),
        (-np.zeros(2, np.float32), "np.full(2, -0.0, np.float32)"),
        (np.full((2, 2), 0.1, np.float32), "np.full((2, 2), 0.1, np.float32)"),
        (np.full(3, -np.inf, np.float32), "np.full(3, -np.inf, np.float32)"),
        (np.arange(6, dtype=np.int32).reshape(2, 3), "np.arange(6, dtype=np.int32).reshape(2, 3)"),
        (np.array([1.5, -2, np.nan], np.float32), "np.array([1.5, -2, np.nan], np.float32)"),
        (np.array([[True], [False]]), "np.array([[True], [False]], np.bool_)"),
        (np.float32(3), "np.float32(3)"),
        (jnp.array([1.5, 2.5], jnp.bfloat16), "np.array([1.5, 2.5], jnp.bfloat16)"),
        (draw(40), None),
    ],
)
def test_arrays(x, text):
    assert literal(x) == text
    if text is not None:
        again = eval(text, {"np": np, "jnp": jnp})
        assert again.dtype == x.dtype and again.tobytes() == np.asarray(x).tobytes()
