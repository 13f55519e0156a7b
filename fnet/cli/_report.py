"""`fnet report RUN [RUN ...]`: writes one HTML file that shows training runs."""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = (
    __doc__
    + """

A RUN is the folder of a training run, as fit(workdir=) and the experiments write it. The file loads nothing, and can be
sent to others. It shows learning curves, speed, predictions, text samples, the model, profiles, differences between the
configurations, environment, the plan, checkpoints and events. Runs that differ in their seed alone are drawn as one
band.

    fnet report runs/digits
    fnet report runs/digits runs/digits/last20 -o digits.html
"""
)


def define(commands: Any) -> None:
    """Adds the command `report` to the parser of `fnet`."""
    parser = commands.add_parser(
        "report",
        help="write an HTML report of training runs",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="+", help="folder of a run; several runs are compared")
    parser.add_argument(
        "-o",
        "--output",
        help="path of the report (default: report.html in the folder of the first run)",
    )


def run(args: argparse.Namespace) -> int:
    from fnet import report

    path = report.write(args.run, args.output)
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0
