"""The table of cases: for each, fnet's layer and options, the shapes of parameters and inputs, and
PyTorch's twin."""

import dataclasses
from collections.abc import Callable

import torch
import torch_twins as twins


@dataclasses.dataclass
class Case:
    """One configuration of one layer.

    Attributes:
        name: "layer-what is special about it", the test's id.
        layer: the name of fnet's layer; options: its fields.
        params, inputs: for each name `make(draw) -> tensor`; floating-point ones get gradients.
        twin: `twin(params, **inputs, **twin_options) -> {name: output}`.
        call: how the test calls the layer (train=, method=, ...).
        zero: the leaves whose gradient is zero in exact arithmetic.
    """

    name: str
    layer: str
    options: dict
    params: dict[str, Callable]
    inputs: dict[str, Callable]
    twin: Callable
    twin_options: dict = dataclasses.field(default_factory=dict)
    call: dict = dataclasses.field(default_factory=dict)
    zero: tuple[str, ...] = ()


def normal(*shape, scale=1.0, shift=0.0):
    return lambda draw: shift + scale * draw(shape)


def near_one(*shape):
    """Scales of a norm, and variances: positive, and none of them 1."""
    return lambda draw: (0.25 * draw(shape)).exp()


def given(values, dtype=None):
    return lambda draw: torch.tensor(values, dtype=dtype)


def linear():
    def case(what, shape, features, use_bias=True):
        params = {"kernel": normal(shape[-1], features)} | (
            {"bias": normal(features)} if use_bias else {}
        )
        return Case(
            f"dense-{what}",
            "Dense",
            {"features": features, "use_bias": use_bias},
            params,
            {"x": normal(*shape)},
            twins.dense,
        )

    return [
        case("matrix", (5, 7), 3),
        case("matrix-no-bias", (5, 7), 3, use_bias=False),
        case("sequence", (2, 5, 7), 4),
        case("sequence-no-bias", (2, 5, 7), 4, use_bias=False),
        case("vector", (6,), 4),
        case("one-feature", (3, 6), 1),
    ]


def window_of(options, dims):
    return twins.each(options["kernel_size"], dims)


def conv():
    def case(what, shape, features, kernel_size, use_bias=True, layer="Conv", **options):
        """The input is [batch, *space, in]."""
        options["kernel_size"] = kernel_size
        window, groups = window_of(options, len(shape) - 2), options.get("groups", 1)
        params = {"kernel": normal(*window, shape[-1] // groups, features)}
        params |= {"bias": normal(features)} if use_bias else {}
        return Case(
            f"conv-{what}",
            layer,
            {"features": features, "use_bias": use_bias, **options},
            params,
            {"x": normal(*shape)},
            twins.conv,
            options,
        )

    def depthwise(what, shape, kernel_size, multiplier=1, **options):
        options["kernel_size"] = kernel_size
        features = shape[-1] * multiplier
        params = {
            "kernel": normal(*window_of(options, len(shape) - 2), 1, features),
            "bias": normal(features),
        }
        return Case(
            f"depthwise-{what}",
            "DepthwiseConv",
            {"multiplier": multiplier, **options},
            params,
            {"x": normal(*shape)},
            twins.depthwise_conv,
            options,
        )

    return [
        case("1d-same", (2, 9, 3), 4, 3),
        case("1d-same-even-window", (2, 9, 3), 4, 4),
        case("1d-same-stride", (2, 10, 3), 4, 3, strides=2),
        case("1d-valid-stride-dilation", (2, 12, 3), 4, 3, strides=2, padding="VALID", dilation=2),
        case("1d-causal-dilation", (2, 9, 3), 4, 3, padding="CAUSAL", dilation=2),
        case("1d-explicit-groups", (2, 9, 4), 6, 5, padding=2, groups=2),
        case("2d-same", (2, 6, 7, 3), 4, 3),
        case("2d-same-no-bias", (2, 6, 7, 3), 4, 3, use_bias=False),
        case("2d-same-stride", (2, 6, 7, 3), 4, 3, strides=2),
        case("2d-same-stride-beyond-window", (2, 7, 8, 3), 4, 1, strides=2),
        case("2d-same-dilation", (2, 7, 8, 2), 3, 3, dilation=2),
        case("2d-same-rectangle", (1, 8, 9, 2), 3, (2, 5), strides=(3, 2), dilation=(2, 1)),
        case("2d-valid", (2, 6, 7, 3), 4, (3, 2), padding="VALID"),
        case("2d-explicit", (2, 6, 7, 3), 4, 3, strides=2, padding=1),
        case("2d-explicit-each", (2, 6, 7, 3), 4, 3, padding=(2, 1)),
        case("2d-explicit-pairs", (2, 6, 7, 3), 4, 3, strides=(1, 2), padding=((0, 2), (3, 1))),
        case("2d-groups", (2, 5, 6, 4), 6, 3, groups=2),
        case(
            "2d-groups-stride-dilation",
            (2, 8, 9, 6),
            9,
            3,
            strides=2,
            padding=2,
            dilation=2,
            groups=3,
        ),
        case("2d-groups-are-channels", (2, 5, 6, 3), 6, 3, groups=3),
        case("3d-same-stride", (1, 4, 5, 6, 2), 3, 3, strides=2),
        case("3d-valid-groups", (1, 4, 5, 4, 4), 4, (2, 3, 1), padding="VALID", groups=2),
        case("3d-explicit-dilation", (1, 5, 4, 5, 2), 3, 2, padding=1, dilation=(2, 1, 2)),
        depthwise("1d-causal", (2, 8, 3), 4, padding="CAUSAL"),
        depthwise("2d-same", (2, 6, 7, 4), 3),
        depthwise(
            "2d-multiplier-stride", (2, 6, 7, 3), 3, multiplier=2, strides=2, padding="VALID"
        ),
        depthwise("2d-dilation", (2, 7, 7, 3), 3, padding=2, dilation=2),
    ]


def conv_transpose():
    def case(what, shape, features, kernel_size, use_bias=True, **options):
        options["kernel_size"] = kernel_size
        groups = options.get("groups", 1)
        params = {
            "kernel": normal(*window_of(options, len(shape) - 2), shape[-1] // groups, features)
        }
        params |= {"bias": normal(features)} if use_bias else {}
        return Case(
            f"conv-transpose-{what}",
            "ConvTranspose",
            {"features": features, "use_bias": use_bias, **options},
            params,
            {"x": normal(*shape)},
            twins.conv_transpose,
            options,
        )

    return [
        case("1d-valid", (2, 5, 3), 4, 3, padding="VALID"),
        case("1d-valid-stride", (2, 5, 3), 4, 4, strides=2, padding="VALID"),
        case("1d-explicit-stride", (2, 5, 3), 4, 4, strides=2, padding=1),
        case("1d-output-padding", (2, 5, 3), 4, 3, strides=2, padding=1, output_padding=1),
        case("1d-same-stride", (2, 5, 3), 4, 3, strides=2),
        case("1d-dilation", (2, 6, 3), 4, 3, padding=2, dilation=2),
        case("2d-same", (2, 4, 5, 3), 4, 3),
        case("2d-same-even-window-stride", (2, 4, 5, 3), 4, 4, strides=2),
        case("2d-same-odd-window-stride", (2, 4, 5, 3), 4, 3, strides=2),
        case("2d-same-stride-beyond-window", (2, 3, 4, 2), 3, 2, strides=3),
        case("2d-valid-no-bias", (2, 4, 5, 3), 4, (3, 2), use_bias=False, padding="VALID"),
        case("2d-explicit-each", (2, 4, 5, 3), 4, (3, 4), strides=(2, 3), padding=(1, 2)),
        case("2d-explicit-pairs", (2, 4, 5, 3), 4, 3, strides=2, padding=((0, 1), (1, 2))),
        case(
            "2d-output-padding",
            (2, 4, 5, 3),
            4,
            3,
            strides=(2, 3),
            padding=1,
            output_padding=(1, 2),
        ),
        case("2d-groups", (2, 4, 5, 4), 6, 3, strides=2, padding=1, groups=2),
        case("2d-groups-dilation", (2, 4, 5, 6), 3, 3, padding="VALID", dilation=(2, 1), groups=3),
        case("3d-explicit-stride", (1, 2, 3, 3, 2), 3, 3, strides=2, padding=1, output_padding=1),
    ]


def embed():
    table, options = {"embedding": normal(11, 4)}, {"vocab_size": 11, "features": 4}
    tokens = given([[3, 0, 10, 3], [7, 3, 1, 10]])
    return [
        Case("embed-sequence", "Embed", options, table, {"tokens": tokens}, twins.embed),
        Case("embed-one-axis", "Embed", options, table, {"tokens": given([5, 5, 2])}, twins.embed),
        Case(
            "embed-attend",
            "Embed",
            options,
            table,
            {"x": normal(2, 3, 4)},
            twins.attend,
            call={"method": "attend"},
        ),
        Case("embed-tied", "tied", options, table, {"tokens": tokens}, twins.tied),
    ]


def norm():
    def case(
        what, layer, twin, shape, use_scale=True, use_bias=True, spread=1.0, shift=0.0, **options
    ):
        params = {"scale": near_one(shape[-1])} if use_scale else {}
        params |= {"bias": normal(shape[-1])} if use_bias else {}
        return Case(
            what,
            layer,
            {"use_scale": use_scale, "use_bias": use_bias, **options},
            params,
            {"x": normal(*shape, scale=spread, shift=shift)},
            twin,
            options,
        )

    def layer_norm(what, shape, **options):
        return case(f"layer-norm-{what}", "LayerNorm", twins.layer_norm, shape, **options)

    def rms_norm(what, shape, use_bias=False, **options):
        return case(
            f"rms-norm-{what}", "RMSNorm", twins.rms_norm, shape, use_bias=use_bias, **options
        )

    def group_norm(what, shape, groups, **options):
        return case(
            f"group-norm-{what}", "GroupNorm", twins.group_norm, shape, groups=groups, **options
        )

    return [
        layer_norm("matrix", (4, 8)),
        layer_norm("sequence", (2, 3, 8)),
        layer_norm("no-bias", (2, 3, 8), use_bias=False),
        layer_norm("plain", (2, 3, 8), use_scale=False, use_bias=False),
        layer_norm("epsilon", (2, 3, 8), spread=0.125, epsilon=0.01),
        layer_norm("off-centre", (4, 16), shift=4.0),
        rms_norm("matrix", (4, 8)),
        rms_norm("sequence", (2, 3, 8)),
        rms_norm("plain", (2, 3, 8), use_scale=False),
        rms_norm("bias", (2, 3, 8), use_bias=True),
        rms_norm("epsilon", (2, 3, 8), spread=0.125, epsilon=0.01),
        group_norm("2d", (2, 4, 5, 6), 3),
        group_norm("one-group", (2, 4, 5, 6), 1),
        group_norm("instance", (2, 4, 5, 6), 6),
        group_norm("1d", (2, 7, 4), 2),
        group_norm("matrix", (3, 8), 2),
        group_norm("3d-no-scale", (1, 2, 3, 4, 4), 2, use_scale=False),
        group_norm("epsilon", (2, 4, 5, 6), 3, spread=0.125, epsilon=0.01),
    ]


def batch_norm():
    def case(what, shape, train, use_scale=True, use_bias=True, **options):
        """x is [steps, batch, ..., channels]; the running statistics begin anywhere but at 0 and 1."""
        channels = shape[-1]
        params = {"scale": near_one(channels)} if use_scale else {}
        params |= {"bias": normal(channels)} if use_bias else {}
        start = {
            "mean": [0.5 - 0.25 * i for i in range(channels)],
            "var": [0.75 + 0.5 * i for i in range(channels)],
        }
        twin_options = {"train": train, **options}
        twin_options |= {
            name: torch.tensor(values, dtype=torch.float64) for name, values in start.items()
        }
        return Case(
            f"batch-norm-{what}",
            "BatchNorm",
            {"use_scale": use_scale, "use_bias": use_bias, **options},
            params,
            {"x": normal(*shape)},
            twins.batch_norm,
            twin_options,
            call={"train": train, "steps": True, "state": start},
        )

    return [
        case("matrix-train", (2, 6, 3), True),
        case("1d-train", (2, 3, 5, 3), True),
        case("2d-train", (2, 2, 4, 5, 3), True),
        case("2d-train-momentum-epsilon", (3, 2, 4, 5, 3), True, momentum=0.75, epsilon=0.01),
        case("2d-train-plain", (2, 2, 4, 5, 3), True, use_scale=False, use_bias=False),
        case("3d-train", (2, 2, 2, 3, 4, 2), True),
        case("matrix-eval", (1, 6, 3), False),
        case("1d-eval", (1, 3, 5, 3), False),
        case("2d-eval", (1, 2, 4, 5, 3), False),
        case("2d-eval-no-scale", (1, 2, 4, 5, 3), False, use_scale=False),
    ]


def pool():
    def case(kind, what, shape, **options):
        layer, twin = {"max": ("MaxPool", twins.max_pool), "avg": ("AvgPool", twins.avg_pool)}[kind]
        return Case(f"{kind}-pool-{what}", layer, options, {}, {"x": normal(*shape)}, twin, options)

    def global_pool(what, shape):
        return Case(
            f"global-avg-pool-{what}",
            "GlobalAvgPool",
            {},
            {},
            {"x": normal(*shape)},
            twins.global_avg_pool,
        )

    both = [
        case(kind, what, shape, **options)
        for kind in ("max", "avg")
        for what, shape, options in (
            ("1d", (2, 9, 3), dict(window=2)),
            ("1d-overlap", (2, 9, 3), dict(window=3, strides=1)),
            ("1d-same-stride", (2, 10, 3), dict(window=3, strides=2, padding="SAME")),
            ("2d", (2, 6, 7, 3), dict(window=2)),
            ("2d-overlap", (2, 7, 8, 3), dict(window=3, strides=2)),
            ("2d-gaps", (2, 7, 8, 3), dict(window=2, strides=3)),
            ("2d-rectangle", (2, 6, 9, 2), dict(window=(2, 3), strides=(1, 2))),
            ("2d-padding", (2, 7, 8, 3), dict(window=3, strides=2, padding=1)),
            ("2d-padding-pairs", (2, 6, 7, 3), dict(window=3, strides=2, padding=((0, 1), (2, 1)))),
            ("2d-same", (2, 5, 6, 3), dict(window=3, strides=2, padding="SAME")),
            ("3d", (1, 4, 5, 6, 2), dict(window=2)),
        )
    ]
    return [
        *both,
        case(
            "avg",
            "1d-padding-counted",
            (2, 9, 3),
            window=3,
            strides=2,
            padding=1,
            count_padding=True,
        ),
        case(
            "avg",
            "2d-padding-counted",
            (2, 7, 8, 3),
            window=3,
            strides=2,
            padding=1,
            count_padding=True,
        ),
        case(
            "avg",
            "2d-same-counted",
            (2, 5, 6, 3),
            window=3,
            strides=2,
            padding="SAME",
            count_padding=True,
        ),
        global_pool("1d", (2, 5, 3)),
        global_pool("2d", (2, 4, 5, 3)),
        global_pool("3d", (2, 2, 3, 4, 3)),
    ]


def attention():
    def case(what, shape, heads, twin, context=None, **options):
        """x is [b, t, f], context [b, s, f']; masks, lengths and positions are lists."""
        *_, features = shape
        inputs = {"x": normal(*shape)} | ({"context": normal(*context)} if context else {})
        inputs |= {
            name: given(options.pop(name))
            for name in ("mask", "lengths", "positions")
            if name in options
        }
        dim, source = options.get("head_dim") or features // heads, (context or shape)[-1]
        outs = {
            name: count * dim
            for name, count in (
                ("query", heads),
                ("key", options.get("kv_heads") or heads),
                ("value", options.get("kv_heads") or heads),
            )
        }
        sizes = {"query": features, "key": source, "value": source}
        params = {
            f"{name}/kernel": normal(sizes[name], out, scale=sizes[name] ** -0.5)
            for name, out in outs.items()
        }
        params["out/kernel"] = normal(heads * dim, features, scale=(heads * dim) ** -0.5)
        if options.get("use_bias", True):
            params |= {
                f"{name}/bias": normal(out, scale=0.5)
                for name, out in {**outs, "out": features}.items()
            }
        # A bias on all keys adds the same to every logit of a query, which softmax takes no notice
        # of, unless positions turn it. Where there is one key to see, it takes no notice of
        # anything.
        zero = (
            ("params/key/bias",)
            if options.get("use_bias", True) and "rotary" not in options
            else ()
        )
        zero += ("params/query/kernel", "params/key/kernel") if options.get("window") == 1 else ()
        return Case(
            f"attention-{what}",
            "Attention",
            {"heads": heads, **options},
            params,
            inputs,
            twin,
            {"heads": heads, **options},
            zero=zero,
        )

    def multihead(what, shape, heads, **options):
        return case(f"multihead-{what}", shape, heads, twins.multihead_attention, **options)

    def grouped(what, shape, heads, **options):
        return case(f"grouped-{what}", shape, heads, twins.grouped_attention, **options)

    def rotary(what, shape, positions, **options):
        return Case(
            f"rotary-{what}",
            "Rotary",
            options,
            {},
            {"x": normal(*shape), "positions": given(positions)},
            twins.rotate,
            options,
        )

    square = [
        [True, False, True, True, True],
        [True, True, False, False, True],
        [False, False, True, False, False],
        [True, True, True, True, True],
        [False, True, False, True, False],
    ]
    oblong = [[*row[:3], True] for row in square]
    flipped = [row[::-1] for row in square]
    return [
        multihead("self", (2, 5, 8), 2),
        multihead("one-head-no-bias", (2, 5, 8), 1, use_bias=False),
        multihead("causal", (2, 5, 8), 4, causal=True),
        multihead("cross", (2, 5, 8), 2, context=(2, 4, 8)),
        multihead("cross-other-width", (2, 5, 8), 2, context=(2, 4, 6)),
        multihead("cross-lengths", (3, 5, 8), 2, context=(3, 4, 8), lengths=[4, 1, 3]),
        multihead("cross-mask", (2, 5, 8), 2, context=(2, 4, 8), mask=oblong),
        multihead("lengths", (3, 5, 8), 2, lengths=[5, 2, 1]),
        multihead("causal-lengths", (3, 5, 8), 2, causal=True, lengths=[5, 3, 1]),
        multihead("mask", (2, 5, 8), 2, mask=square),
        multihead("mask-each-row", (2, 5, 8), 2, mask=[square, flipped]),
        multihead("mask-each-head", (1, 5, 8), 2, mask=[[square, flipped]]),
        multihead(
            "causal-mask",
            (2, 5, 8),
            2,
            causal=True,
            use_bias=False,
            mask=[[True, *row[1:]] for row in square],
        ),
        grouped("kv-heads", (2, 5, 8), 4, kv_heads=2),
        grouped("one-kv-head-causal", (2, 5, 8), 4, kv_heads=1, causal=True),
        grouped("head-dim", (2, 5, 6), 4, kv_heads=2, head_dim=5, use_bias=False),
        grouped("causal-window", (2, 7, 8), 2, causal=True, window=3),
        grouped("causal-window-of-one", (1, 4, 8), 2, causal=True, window=1, use_bias=False),
        grouped("window", (2, 7, 8), 2, window=2),
        grouped(
            "kv-heads-lengths-mask",
            (2, 5, 8),
            4,
            kv_heads=2,
            lengths=[5, 3],
            mask=[[True, *row[1:]] for row in square],
        ),
        grouped("blind-query", (1, 5, 8), 2, mask=[[False] * 5, *square[1:]]),
        grouped("rotary", (2, 6, 8), 2, rotary={}),
        grouped("rotary-interleaved", (2, 6, 8), 2, rotary={"interleaved": True}),
        grouped(
            "rotary-positions",
            (2, 4, 8),
            2,
            rotary={"base": 500.0},
            causal=True,
            use_bias=False,
            positions=[[3, 4, 5, 6], [0, 1, 2, 9]],
        ),
        grouped(
            "everything",
            (2, 7, 12),
            6,
            kv_heads=3,
            head_dim=4,
            causal=True,
            window=4,
            rotary={"base": 100.0},
            lengths=[7, 5],
        ),
        rotary("halves", (2, 6, 3, 8), [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 30]]),
        rotary(
            "interleaved",
            (2, 6, 3, 8),
            [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 30]],
            interleaved=True,
        ),
        rotary("base", (1, 4, 1, 6), [[0, 10, 20, 30]], base=50.0),
    ]


def recurrent():
    gates = {"RNN": 1, "LSTM": 4, "GRU": 3}

    def case(
        layer,
        what,
        shape=(3, 5, 4),
        features=3,
        lengths=None,
        carry=False,
        outputs_only=False,
        **options,
    ):
        """Ragged rows have numbers past their end, which no output and no gradient may notice."""
        columns, params = gates[layer] * features, {}
        places = ("forward/", "backward/") if options.get("bidirectional") else ("",)
        for place in places:
            params[f"{place}kernel"] = normal(shape[-1], columns, scale=0.5)
            params[f"{place}recurrent_kernel"] = normal(features, columns, scale=0.5)
            if options.get("use_bias", True):
                params[f"{place}bias"] = normal(columns, scale=0.5)
                if layer == "GRU":
                    params[f"{place}recurrent_bias"] = normal(features, scale=0.5)
        inputs = {"x": normal(*shape)}
        if carry:
            kinds = ("hidden", "cell") if layer == "LSTM" else ("hidden",)
            inputs |= {
                f"carry/{place}{kind}": normal(shape[0], features)
                for place in places
                for kind in kinds
            }
        if lengths:
            inputs["lengths"] = given(lengths)
        options = {"features": features, **options}
        return Case(
            f"{layer.lower()}-{what}",
            layer,
            options,
            params,
            inputs,
            twins.recurrent,
            {"layer": layer, "outputs_only": outputs_only, **options},
            call={} if outputs_only else {"method": "scan"},
        )

    return [
        case(layer, what, **options)
        for layer in gates
        for what, options in (
            ("outputs", dict(outputs_only=True)),
            ("scan", dict()),
            ("no-bias", dict(use_bias=False)),
            ("one-step", dict(shape=(2, 1, 4), carry=True)),
            ("carry", dict(carry=True)),
            ("lengths", dict(lengths=[3, 5, 1])),
            ("lengths-carry", dict(lengths=[1, 4, 2], carry=True)),
            ("both-ways", dict(bidirectional=True)),
            ("both-ways-outputs", dict(bidirectional=True, lengths=[5, 2, 3], outputs_only=True)),
            ("both-ways-lengths", dict(bidirectional=True, lengths=[2, 5, 1])),
            (
                "both-ways-lengths-carry",
                dict(bidirectional=True, lengths=[4, 1, 3], carry=True, use_bias=False),
            ),
        )
    ] + [case("RNN", "relu", activation="relu", lengths=[3, 5, 1])]


FAMILIES = {
    "linear": linear,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "embed": embed,
    "norm": norm,
    "batch_norm": batch_norm,
    "pool": pool,
    "attention": attention,
    "recurrent": recurrent,
}
