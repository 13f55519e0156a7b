"""`fnet bundle show | check | renew FILE`: describes, checks and renews bundles (files that
`fnet.export` writes)."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

_DESCRIPTION = """Describes, checks and renews bundles, the files that fnet.export writes.

  fnet bundle show digits.fnet      signature, size, versions, and how long JAX guarantees to read it
  fnet bundle check digits.fnet     also runs all programs on the inputs in the file, with JAX and with NumPy
  fnet bundle renew digits.fnet     writes the programs again with the installed version of JAX

check exits with 1 if JAX cannot read the programs or an output differs.
"""


def define(commands: Any) -> None:
    """Adds the command `bundle` to the parser of `fnet`."""
    bundle = commands.add_parser(
        "bundle",
        help="describe, check or renew an exported model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
    )
    bundle.add_argument(
        "action",
        choices=("show", "check", "renew"),
        help="describe the bundle, check its results, or export its programs again",
    )
    bundle.add_argument("file", help="path of the bundle")
    bundle.add_argument(
        "--output", help="path of the renewed bundle (default: the bundle is replaced)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command `fnet bundle` and returns its exit code."""
    from fnet import export

    if args.action == "renew":
        export.renew(args.file, args.output)
        bundle = export.load(args.output or args.file)
        print(
            f"{args.output or args.file}: renewed; JAX guarantees to read it until "
            f"{bundle.read_until}"
        )
        return 0
    bundle = export.load(args.file)
    _show(bundle)
    if args.action == "show":
        return 0
    try:
        lines = bundle.check()
    except export.BundleError as error:
        print(error)
        for entry in bundle.entries:
            if not bundle.manifest["entries"][entry].get("not_stable"):
                print(f"{entry}: {bundle.checked_by_numpy(entry)}")
        return 1
    print("\n".join(lines))
    return 0


def _show(bundle: Any) -> None:
    manifest = bundle.manifest
    for entry in bundle.entries:
        sizes = {
            kind: manifest["files"][f"programs/{entry}.{kind}.jax"]["bytes"]
            for kind in manifest["entries"][entry]["custom_calls"]
        }
        programs = ", ".join(f"{kind} {size:,} bytes" for kind, size in sizes.items())
        stable = manifest["entries"][entry].get("not_stable")
        print(bundle.signature(entry))
        print(f"  {programs}; stable form {'missing: ' + stable if stable else 'included'}")
    count = sum(array.size for array in bundle.weights.values())
    print(
        f"weights: {len(bundle.weights)} arrays, {count:,} numbers, "
        f"{sum(array.nbytes for array in bundle.weights.values()):,} bytes"
    )
    if bundle.labels:
        shown = ", ".join(bundle.labels[:5])
        print(f"labels: {len(bundle.labels)} ({shown}{', ...' if len(bundle.labels) > 5 else ''})")
    for kind, text in manifest["requires"].items():
        if kind != "portable":
            print(f"{kind} requires {text}")
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    print(f"written {manifest['created']} by {versions}")
    days = (datetime.date.fromisoformat(bundle.read_until) - datetime.date.today()).days
    if days < 0:
        print(
            f"JAX's guarantee to read it ended on {bundle.read_until}: run fnet bundle renew "
            f"{bundle.path}"
        )
    else:
        print(f"JAX guarantees to read it until {bundle.read_until} ({days} days)")
