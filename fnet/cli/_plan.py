"""`fnet plan module:function`: plans a training step for several devices, which need not be
attached."""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from fnet.cli._console import still

_DESCRIPTION = (
    __doc__
    + """

The function has no arguments and returns (step, init, batch):
  step(state, batch) -> (state, metrics), written for one device;
  init(key) -> state; the model's parameters are state["params"] or state.params;
  batch, or its shapes.
The module of the function is executed. Example: a file train.py,

    import jax
    import jax.numpy as jnp

    def init(key):
        return {"params": {"kernel": 0.01 * jax.random.normal(key, (784, 512))}}

    def step(state, batch):
        def loss(params):
            return jnp.square(batch["x"] @ params["kernel"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params}, {"loss": value}

    def make():
        return step, init, {"x": jax.ShapeDtypeStruct((4096, 784), jnp.float32)}

and the commands

    fnet plan train.py:make --devices v5e:4x4
    fnet plan train.py:make --devices h100:2x8 --mesh data=-1,tensor=4 --rule 'kernel=None,tensor'
"""
)


def define(commands: Any) -> None:
    """Adds the command `plan` to the parser of `fnet`."""
    plan = commands.add_parser(
        "plan",
        help="show how to run a training step on several devices, attached or not",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
    )
    plan.add_argument(
        "function", help="function that returns the step, as module:function or file.py:function"
    )
    plan.add_argument(
        "--devices",
        default="local",
        help="devices to plan for: local (default), v5e:16x16, v5p:4x4x4*2, h100:4x8, 'RTX 3080', dgx-1",
    )
    plan.add_argument(
        "--strategy",
        default="auto",
        help="strategy: auto (default), data, zero1, fsdp or fsdp+pins; +remat and +microbatches=N can "
        "be appended to each",
    )
    plan.add_argument("--mesh", help="names and sizes of the mesh axes, such as data=-1,tensor=4")
    plan.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=AXES",
        help="mesh axis for each axis of the parameters whose path matches PATTERN, such as "
        "'fc/kernel=None,tensor'; can be repeated",
    )
    plan.add_argument(
        "--estimate", action="store_true", help="estimate the cost without compiling the step"
    )
    plan.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw the strategies' times and memory (.png, .svg or .pdf; needs matplotlib)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ValueError: the function, the mesh or a rule is invalid.
    """
    from fnet import parallel

    mesh = _mesh(args.mesh) if args.mesh else None
    rules = dict(_rule(text) for text in args.rule)
    with still("plan", f"running {args.function}") as heartbeat:
        plan = parallel.plan(
            *found(args.function),
            devices=args.devices,
            strategy=args.strategy,
            mesh=mesh,
            rules=rules,
            compile=not args.estimate,
            announce=heartbeat.begin,
        )
        heartbeat.begin("describing the plan")
        text = str(plan)
    print(text)
    if args.plot:
        plan.compare().plot(args.plot)
        print(args.plot)
    return 0


def found(name: str) -> tuple:
    """Imports the function with the name `module:function`, calls it, and returns its result,
    (step, init, batch)."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ValueError(f"{name!r}: expected module:function or file.py:function")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ValueError(f"there is no file {where}")
        sys.path.insert(0, str(Path(where).resolve().parent))
        module = _loaded(Path(where))
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name and not where.startswith(error.name):
                raise
            raise ValueError(f"there is no module {where}, also not in this folder") from None
    if not callable(getattr(module, function, None)):
        raise ValueError(f"{where} has no function {function!r}")
    made = getattr(module, function)()
    if (
        not isinstance(made, tuple)
        or len(made) != 3
        or not callable(made[0])
        or not callable(made[1])
    ):
        raise ValueError(
            f"{name} must return (step, init, batch); it returned "
            f"{f'{len(made)} values' if isinstance(made, tuple) else type(made).__name__}"
        )
    return made


class _AsWritten(importlib.machinery.SourceFileLoader):
    """Compiles the file as it stands. Cached bytecode is told by the file's second and size
    alone, so after an edit of one digit it could still be the old program."""

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)


def _loaded(file: Path):
    """The module of a Python file, registered under the file's name unless another module has
    it (a dataclass looks for the module in which it is defined)."""
    loader = _AsWritten(file.stem, str(file))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    )
    known = sys.modules.get(file.stem)
    if known is None or getattr(known, "__file__", None) == module.__file__:
        sys.modules[file.stem] = module
    loader.exec_module(module)
    return module


def _mesh(text: str) -> dict[str, int]:
    try:
        return {
            name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))
        }
    except ValueError:
        raise ValueError(
            f"--mesh={text}: expected axes and their lengths, such as data=-1,tensor=4"
        ) from None


def _rule(text: str) -> tuple[str, tuple[str | None, ...]]:
    pattern, found, axes = text.rpartition("=")
    if not found or not axes:
        raise ValueError(
            f"--rule={text}: expected a pattern, = and a mesh axis or None for each axis of the "
            "parameter, such as fc/kernel=None,tensor"
        )
    return pattern, tuple(
        None if axis.strip().lower() == "none" else axis.strip() for axis in axes.split(",")
    )
