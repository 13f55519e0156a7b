"""graph: edges are those of the jaxpr, costs add up, layouts are readable, files load nothing and
execute no name."""

import collections
import dataclasses
import re
from xml.etree import ElementTree

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from html_checks import check_page
from jax import lax
from jax.extend.core import Literal

from fnet import hardware as hw
from fnet import introspect, models
from fnet import layers as nn
from fnet.introspect._graph._arrange import count_crossings, neighbors

CHIP = "TPU v5e"
BLOCK = nn.Sequential(
    attend=nn.Residual(nn.LayerNorm(), attention=nn.Attention(2, causal=True)),
    mlp=nn.Residual(nn.LayerNorm(), nn.Dense(12), jnp.tanh, nn.Dense(8)),
)
MODEL = nn.Sequential(nn.Dense(8), blocks=nn.Stack(BLOCK, 3), norm=nn.BatchNorm(), head=nn.Dense(4))
SMALL = nn.Sequential(nn.Dense(4), jnp.tanh, nn.Dense(4))


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes_of(model, *inputs):
    shapes = model.spec(*inputs)
    return [
        jax.tree.map(lambda s: spec(*s.shape, dtype=s.dtype), tree)
        for tree in (shapes.params, shapes.state)
    ]


def step_of(model, *inputs):
    """A training step, its state and its batch."""
    (params, extra), tx = shapes_of(model, *inputs), optax.sgd(0.1, momentum=0.9)
    state = {"params": params, "opt": jax.eval_shape(tx.init, params), "extra": extra}

    def step(state, batch):
        def loss(params):
            y, new = model(params, batch["x"], state=state["extra"], train=True)
            return (y.reshape(-1, y.shape[-1])[:, 0] ** 2).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "extra": new,
        }, {"loss": value}

    return step, state, {"x": inputs[0]}


# Which operation reads which, straight from the jaxpr.

CALLS = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")


def flows(f, args, hidden):
    """{(source, output, reader): types}: operations by their number in the order of the program,
    inputs as strings, results as negative numbers."""
    closed = jax.make_jaxpr(f)(*args)
    found, count = collections.defaultdict(set), iter(range(10**9))
    opened = lambda jaxpr: getattr(jaxpr, "jaxpr", jaxpr)

    def run(jaxpr, env):
        env |= {v: set() for v in jaxpr.constvars}
        look = lambda atom: set() if isinstance(atom, Literal) else env[atom]
        for eqn in jaxpr.eqns:
            name, p = eqn.primitive.name, eqn.params
            call = next((p[key] for key in CALLS if key in p), None)
            if name in (
                "jit",
                "pjit",
                "custom_jvp_call",
                "custom_vjp_call",
                "remat2",
                "checkpoint",
                "closed_call",
            ):
                body = opened(call)
                inner = run(body, dict(zip(body.invars, map(look, eqn.invars))))
                env |= {
                    v: set() if isinstance(o, Literal) else inner[o]
                    for v, o in zip(eqn.outvars, body.outvars)
                }
                continue
            number, bodies, own = next(count), [], list(eqn.invars)
            if name == "scan":
                bodies, own = [(opened(p["jaxpr"]), eqn.invars)], []
            elif name == "while":
                a, b = p["cond_nconsts"], p["body_nconsts"]
                bodies = [
                    (opened(p["cond_jaxpr"]), eqn.invars[:a] + eqn.invars[a + b :]),
                    (opened(p["body_jaxpr"]), eqn.invars[a:]),
                ]
                own = []
            elif name == "cond":
                bodies, own = (
                    [(opened(branch), eqn.invars[1:]) for branch in p["branches"]],
                    eqn.invars[:1],
                )
            outs = [set() for _ in eqn.outvars]
            for k, (body, given) in enumerate(bodies):
                inner = run(body, dict(zip(body.invars, map(look, given))))
                if not (name == "while" and k == 0):
                    for out, o in zip(outs, body.outvars):
                        out |= set() if isinstance(o, Literal) else inner[o]
            for v in own:
                for source in look(v):
                    if source[0] != "hidden":
                        found[(*source, number)].add(v.aval.shape)
            env |= {v: out or {(number, k)} for k, (v, out) in enumerate(zip(eqn.outvars, outs))}
        return env

    env = run(
        closed.jaxpr,
        {
            v: {("hidden", 0)} if hide else {(f"input {i}", 0)}
            for i, (v, hide) in enumerate(zip(closed.jaxpr.invars, hidden))
        },
    )
    for i, v in enumerate(closed.jaxpr.outvars):
        for source in set() if isinstance(v, Literal) else env[v]:
            if source[0] != "hidden":
                found[(*source, -1 - i)].add(v.aval.shape)
    return found


def edges_of(drawn):
    """The edges of a graph in the same form: how many of each (source, reader)."""
    numbers = {node: i for i, node in enumerate(drawn._flow.ops)}
    inputs = [node for node in drawn.nodes if node.kind == "input"]
    results = [node for node in drawn.nodes if node.kind == "result"]
    name = lambda node: (
        numbers[node] if node in numbers else {True: "in", False: "out"}[node in inputs]
    )
    assert all(reader in numbers or reader in results for _, reader in drawn.edges)
    return collections.Counter(
        (name(value.source), value.output, name(reader)) for value, reader in drawn.edges
    )


def loops(x, y):
    with jax.named_scope("loop"):
        a = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * y), (0, x))[1]
    with jax.named_scope("choice"):
        b = lax.cond(a.sum() > 0, lambda a: jnp.cos(a) + y, lambda a: a, a)
    with jax.named_scope("sum"):
        carry, ys = lax.scan(lambda c, row: (c + jnp.tanh(row) @ y, (c, row)), b.sum(0), x)
    return carry, ys


def shared(params, x):
    with jax.named_scope("embed"):
        h = x @ params["table"]
    with jax.named_scope("middle"):
        h = jnp.tanh(h)
    with jax.named_scope("embed"):
        return h @ params["table"].T


PROGRAMS = {
    "stack": (lambda: (MODEL, (spec(2, 5, 8),))),
    "loops": (lambda: (loops, (spec(4, 4), spec(4, 4)))),
    "shared": (lambda: (shared, ({"table": spec(3, 5), "unused": spec(2)}, spec(2, 3)))),
    "step": (
        lambda: (lambda step, state, batch: (step, (state, batch)))(*step_of(MODEL, spec(2, 5, 8)))
    ),
    "CNN step": (
        lambda: (lambda step, state, batch: (step, (state, batch)))(
            *step_of(models.CNN(3, (4, 6)), spec(2, 8, 8, 3))
        )
    ),
    "remat": (
        lambda: (
            jax.grad(lambda p, x: jax.checkpoint(SMALL)(p, x).sum()),
            (shapes_of(SMALL, spec(2, 4))[0], spec(2, 4)),
        )
    ),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_edges_are_those_of_the_jaxpr(name):
    f, args = PROGRAMS[name]()
    drawn = introspect.graph(f, *args, chip=CHIP)
    if name == "stack":
        trees = shapes_of(f, *args)
        run = lambda params, state, x: f(params, x, state=state)
        wanted = flows(run, (*trees, *args), [True] * len(jax.tree.leaves(trees)) + [False])
    else:
        first = len(jax.tree.leaves(args[0]))
        wanted = flows(f, args, [first > 1] * first + [False] * 9)
    readable = lambda node, way: way if isinstance(node, str) or node < 0 else node
    expected = collections.Counter((readable(a, "in"), k, readable(b, "out")) for a, k, b in wanted)
    got = edges_of(drawn)
    assert set(got) == set(expected) and len(expected) > 4
    assert all(got[key] >= 1 for key in expected)
    parents = [(child, node) for node in drawn.nodes for child in node.children]
    assert (
        all(child.parent is node for child, node in parents)
        and len(parents) == len(drawn.nodes) - 1
    )


def test_costs_add_up():
    step, state, batch = step_of(MODEL, spec(2, 5, 8))
    drawn, counted = introspect.graph(step, state, batch, chip=CHIP), hw.count(step, state, batch)
    for name in (
        "matmul",
        "elementwise",
        "reduction",
        "transcendental",
        "recomputed",
        "bytes",
        "fused_bytes",
    ):
        assert getattr(drawn.root.cost, name) == getattr(counted.total, name), name
    for node in drawn.nodes:
        if node.children:
            assert node.cost.flops == sum(child.cost.flops for child in node.children)
    assert (
        drawn.root.seconds > 0
        and drawn.root.parameters
        == sum(leaf.size for leaf in jax.tree.leaves(state["params"])) + 16
    )  # with the statistics of BatchNorm


def test_a_model_has_the_parameters_and_kept_activations_of_its_summary():
    drawn, table = (
        f(MODEL, spec(2, 5, 8), chip=CHIP) for f in (introspect.graph, introspect.summary)
    )
    by_path = {node.path: node for node in reversed(drawn.nodes) if node.children}
    for path in ("0", "blocks", "blocks/attend/attention/query", "blocks/mlp", "head"):
        assert by_path[path].parameters == table[path].parameters, path
        assert by_path[path].cost.flops == table[path].forward.flops
        assert by_path[path].kept_bytes == table[path].kept_bytes, path
    assert drawn.root.kept_bytes == table.total.kept_bytes


def test_a_scan_is_drawn_once_and_branches_are_marked():
    drawn = introspect.graph(MODEL, spec(2, 5, 8), chip=CHIP)
    blocks = next(node for node in drawn.nodes if node.path == "blocks")
    assert (blocks.kind, blocks.badge) == ("scan", "× 3") and [c.name for c in blocks.children] == [
        "attend",
        "mlp",
    ]
    kinds = {
        node.kind: node for node in introspect.graph(loops, spec(4, 4), spec(4, 4), chip=CHIP).nodes
    }
    assert [child.name for child in kinds["cond"].children] == ["branch 0", "branch 1"]
    assert [child.name for child in kinds["while"].children] == ["condition", "body"]
    assert kinds["cond"].badge == "2 branches" and kinds["scan"].badge == "× 4"


def test_a_training_step_has_three_phases():
    step, state, batch = step_of(MODEL, spec(2, 5, 8))
    drawn = introspect.graph(jax.jit(step), state, batch, chip=CHIP)
    phases = {node.name: node for node in drawn.root.children if node.kind == "phase"}
    assert list(phases) == ["forward", "backward", "update"]
    assert {"0", "blocks", "norm", "head"} <= {node.name for node in phases["forward"].children}
    assert {"0", "blocks", "norm", "head"} <= {node.name for node in phases["backward"].children}
    assert {"0", "blocks", "norm", "head"} <= {node.name for node in phases["update"].children}
    assert (
        not phases["update"].cost.matmul
        and phases["backward"].cost.matmul > phases["forward"].cost.matmul
    )
    assert phases["forward"].kept_bytes > 0 and phases["backward"].kept_bytes == 0


def test_a_scope_that_is_entered_twice_makes_no_circle():
    drawn = introspect.graph(shared, {"table": spec(3, 5), "bias": spec(2)}, spec(2, 3), chip=CHIP)
    assert [node.name for node in drawn.root.children] == [
        "x",
        "embed",
        "middle",
        "embed (2)",
        "result",
    ]
    for node, made in drawn._made.items():
        layer, _ = neighbors(made)
        if not any(child.kind == "phase" for child in node.children):
            assert all(layer[a] < layer[b] for a, b, _ in made.edges), node


def test_a_residual_connection_goes_around_its_block():
    drawn = introspect.graph(MODEL, spec(2, 5, 8), chip=CHIP)
    attend = next(node for node in drawn.nodes if node.path == "blocks/attend")
    made = drawn._made[attend]
    names = [
        [
            attend.children[i].name
            if i < made.children
            else "port"
            if i < made.children + 2
            else "lane"
            for i in items
        ]
        for items in made.layers
    ]
    assert names == [["port"], ["0", "lane"], ["attention", "lane"], ["add"], ["port"]]
    assert (
        len({made.lines[i] for items in made.layers for i in items}) == 2
    )  # one line down, one lane beside it
    _, pieces = neighbors(made)
    assert count_crossings(made.layers, pieces) == 0
    sizes = drawn_boxes(drawn.svg())
    for a in sizes:
        for b in sizes:
            apart = (
                a[0] + a[2] <= b[0]
                or b[0] + b[2] <= a[0]
                or a[1] + a[3] <= b[1]
                or b[1] + b[3] <= a[1]
            )
            assert a is b or apart


def drawn_boxes(text):
    found = re.findall(
        r'<rect class="n" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', text
    )
    return [tuple(map(float, each)) for each in found]


NASTY = "</script><img src=x onerror=alert(1)>\"'&`]]>\u2028\\"


def test_names_are_never_executed():
    def f(x, y):
        with jax.named_scope("<b>bold</b>"):
            x = jnp.sin(x)
        with jax.named_scope(NASTY.replace("/", "")):
            return {NASTY: jnp.cos(x) @ y}

    drawn = introspect.graph(f, spec(2, 2), spec(2, 2), chip=CHIP)
    data = check_page(drawn.html())
    assert any("onerror" in text for text in data["strings"])  # it is there, as text
    assert "<img" not in drawn.html() and "<b>bold" not in drawn.html()
    root = ElementTree.fromstring(drawn.svg())
    assert not [
        each for each in root.iter() if each.tag.endswith(("script", "img", "foreignObject"))
    ]
    for line in drawn.dot().splitlines():  # quotes are closed on each line
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(jnp.tanh(linen.Dense(4, name="hidden")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.stem, self.head = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.stem(x)))


def of_library(name):
    """The arguments of `graph`, scopes that it shows, and the number of parameters."""
    x, key = jnp.ones((2, 3)), jax.random.key(0)
    if name == "linen":
        return (Linen().apply, jax.eval_shape(Linen().init, key, x), x), {"hidden", "Dense_0"}, 31
    if name == "nnx":
        return (Nnx(nnx.Rngs(0)), x), {"stem", "head"}, 26
    if name == "haiku":
        module = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2], name="mlp")(x)))
        return (module.apply, jax.eval_shape(module.init, key, x), x), {"mlp"}, 26
    return (jax.vmap(eqx.nn.MLP(3, 2, 4, 1, key=key)), x), {"eqx.nn.MLP"}, 26


@pytest.mark.parametrize("library", ["linen", "nnx", "haiku", "equinox"])
def test_other_libraries(library, tmp_path):
    args, names, parameters = of_library(library)
    drawn = introspect.graph(*args, tmp_path / "graph.html", chip=CHIP)
    check_page((tmp_path / "graph.html").read_text())
    assert drawn.root.parameters == parameters
    assert names <= {node.name for node in drawn.nodes}
    assert drawn.root.cost.matmul == 2 * 2 * (3 * 4 + 4 * (3 if library == "linen" else 2))


def test_symbolic_sizes():
    (b,) = jax.export.symbolic_shape("b")
    drawn = introspect.graph(MODEL, spec(b, 5, 8), chip=CHIP)
    check_page(drawn.html())
    assert (
        "f32[b, 5, 4]" in drawn.svg()
        and drawn.root.seconds is None
        and "symbolic" in drawn.notes[-1]
    )


def test_an_unknown_chip_and_a_function_without_derivative():
    drawn = introspect.graph(lambda x: x + 1, spec(3, dtype="int32"), chip="nothing like it")
    assert len(drawn.notes) == 1 and "the peaks of nothing like it are unknown" in drawn.notes[0]
    assert check_page(drawn.html())["nodes"] and [node.name for node in drawn.root.children] == [
        "x",
        "add",
        "result",
    ]


def test_depth_and_forms(tmp_path):
    drawn = introspect.graph(MODEL, spec(2, 5, 8), depth=0, chip=CHIP)
    boxes = [len(drawn_boxes(dataclasses.replace(drawn, _depth=depth).svg())) for depth in range(5)]
    assert boxes == sorted(boxes) and boxes[0] == 6 and boxes[4] > 30
    for ending in ("html", "svg", "dot"):
        introspect.graph(MODEL, spec(2, 5, 8), str(tmp_path / f"g.{ending}"), chip=CHIP)
        assert (tmp_path / f"g.{ending}").stat().st_size > 1000
    text = introspect.graph(MODEL, spec(2, 5, 8), depth=1, chip=CHIP).dot()
    assert (
        "subgraph cluster_" in text
        and '"blocks × 3"' in text
        and text.count("{") == text.count("}")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"color": "red"}, "color='red': expected one of 'flops', 'bytes', 'time'"),
        ({"depth": -1}, "depth=-1: expected the number of levels"),
        ({"depth": 1.5}, "depth=1.5"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        introspect.graph(MODEL, spec(2, 5, 8), **options)


def test_a_wrong_ending_is_found_before_the_work():
    with pytest.raises(
        ValueError,
        match=re.escape("'graph.png' has the ending '.png', expected .html, .svg or .dot"),
    ):
        introspect.graph(None, "graph.png")
    with pytest.raises(
        TypeError, match=r"graph: expected a layer, a flax\.nnx module, or a function"
    ):
        introspect.graph(3, spec(2))


def test_many_operations_without_scopes_are_gathered():
    def f(x):
        for _ in range(200):
            x = jnp.sin(x)
        return x

    drawn = introspect.graph(f, spec(3), chip=CHIP)
    assert [node.name for node in drawn.root.children] == ["x", "1 to 100", "101 to 200", "result"]


@pytest.mark.exhaustive
def test_a_resnet_50_has_at_most_150_kilobytes(tmp_path):
    path = tmp_path / "resnet.html"
    introspect.graph(models.ResNet.preset("resnet50"), spec(8, 224, 224, 3), path, chip=CHIP)
    assert path.stat().st_size <= 150_000


@pytest.mark.exhaustive
def test_a_resnet_50_step_has_less_than_2_megabytes(tmp_path):
    step, state, batch = step_of(models.ResNet.preset("resnet50"), spec(8, 64, 64, 3))
    path = tmp_path / "resnet.html"
    drawn = introspect.graph(step, state, batch, path, chip=CHIP)
    assert len(drawn.nodes) > 5000 and path.stat().st_size < 2_000_000
    assert max(len(node.children) for node in drawn.nodes) <= 160
