"""Runs the tests of programs and transforms with each of JAX's switches for its next constructs on.

    make verify-next                                        # with the newest JAX that pip offers
    python -m tests.next --switches=jax_remat3 jaxpr cost   # one switch, two folders

Prints a table of switches and folders of tests. A failure that is JAX's own is listed in `KNOWN`
with its cause; the program exits with 1 if any other test fails.
"""

import argparse
import fnmatch
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import jax

SWITCHES = ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3", "jax_scan3")
FOLDERS = ("jaxpr", "axes", "cost", "transforms", "compress")
TESTS = pathlib.Path(__file__).parents[1]

# Causes of failures with jax_scan3: what JAX's own Scan3 lacks, in programs that JAX traces.
REMOVED = "jit removes a scan if only its carry is used, and returns the initial carry"
NO_REVERSE = "JAX ignores reverse=True of the scan"
NO_GRADIENT = "JAX has no reverse mode for the scan"
NO_VMAP = "gptq is the vmap of a fori_loop, for which JAX has none"
NO_SEARCH = "jnp.searchsorted is the vmap of a scan, for which JAX has none"
NOT_TRACED = "the test traces with jax.make_jaxpr, which keeps scans closed"

# {switch: {pattern of test names: cause}}
KNOWN: dict[str, dict[str, str]] = {
    "jax_remat3": {
        "tests.jaxpr.test_scopes::test_compiled_programs_have_the_same_paths[[]*remat]": (
            "JAX compiles this program, not fnet, and writes the scopes of a recomputed block twice"
        )
    },
    "jax_scan3": {
        f"tests.{pattern}": why
        for why, patterns in {
            REMOVED: (
                "compress.test_implicit::test_programs[[]nested scan-*]",
                "compress.test_implicit::test_programs[[]remat in scan-*]",
                "compress.test_shrink_models::test_a_shrunk_model_equals_the_*[[]Decoder]",
                "jaxpr.test_hijax::test_the_products_of_a_custom_root_are_reached",
                "jaxpr.test_rewrite_nothing::test_what_closes_over_a_tracer[[]scan-scan]",
                "transforms.test_autocast::test_carries_and_branches_keep_their_dtypes",
                "transforms.test_explicit_meshes::test_capture[[]*]",
                "transforms.test_loss_scale::test_it_grows_after_exactly_2000_good_steps[[]*]",
                "transforms.test_pmap::test_a_result_of_every_device_is_the_same[[]in a scan]",
            ),
            NO_REVERSE: ("compress.test_implicit_slices::test_slices[[]scan-*]",),
            NO_GRADIENT: (
                "compress.test_shrink_programs::test_values_and_derivatives_*[[]recurrent]",
                "jaxpr.test_scopes::test_compiled_programs_have_the_same_paths[[]scan of remat]",
                "transforms.test_autocast_cost::test_the_gradient_of_a_residual_stream_*[[]True]",
                "transforms.test_capture::test_programs_have_no_tags_outside_of_an_inspection",
                "transforms.test_explicit_meshes::test_statistics",
                "transforms.test_explicit_meshes::test_the_values_of_one_device_*[[]scan-*]",
                "transforms.test_rematerialize::test_a_scan_keeps_what_its_turns_are_given[[]*]",
                "transforms.test_tune_accelerators::test_a_step_of_a_language_model",
                "transforms.test_tune_accelerators::test_casts_of_constants_leave_the_loop",
                "transforms.test_tune_accelerators::test_layers_get_separate_weights_*_on_tpus",
            ),
            NO_VMAP: (
                "compress.test_calibrate::test_known_scales_of_activations",
                "compress.test_calibrate::test_the_correction_minimizes_the_error_*[[]*]",
            ),
            NO_SEARCH: (
                "compress.test_quantize::test_nf4_takes_the_nearest_of_its_values",
                "compress.test_quantize::test_zeros_and_constant_blocks",
                "jaxpr.test_hijax::test_functions_of_jax_that_are_hiprims_keep_*[[]*]",
            ),
            NOT_TRACED: (
                "axes.test_batch_axes::test_which_axis_is_the_batch[[]scan *]",
                "transforms.test_replicated::test_may_differ[[]scan]",
            ),
        }.items()
        for pattern in patterns
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.next")
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders of tests")
    parser.add_argument("--switches", default=",".join(SWITCHES))
    parser.add_argument("--exhaustive", action="store_true", help="the exhaustive tests, too")
    parser.add_argument("--jobs", default="auto", help="the -n of pytest")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}", flush=True)
    print("".join(f"{name:>26}" for name in ("", *options.folders)), flush=True)
    unexpected = []
    for switch in options.switches.split(","):
        if not hasattr(jax.config, switch):
            print(f"{switch:>26}  JAX {jax.__version__} has no such switch", flush=True)
            continue
        cells = []
        for folder in options.folders:
            passed, failed = run(switch, folder, options)
            known = [name for name in failed if cause(switch, name)]
            unexpected += [f"{switch} {name}" for name in failed if not cause(switch, name)]
            cells.append(
                f"{passed} ok"
                + f", {len(known)} known" * bool(known)
                + f", {len(failed) - len(known)} FAIL" * (len(failed) > len(known))
            )
        print("".join(f"{cell:>26}" for cell in (switch, *cells)), flush=True)
    for switch, causes in KNOWN.items():
        for pattern, why in causes.items():
            print(f"known with {switch}: {pattern}: {why}")
    print(*(f"FAIL {each}" for each in unexpected), sep="\n")
    return bool(unexpected)


def cause(switch: str, name: str) -> str | None:
    causes = KNOWN.get(switch, {})
    return next((why for pattern, why in causes.items() if fnmatch.fnmatch(name, pattern)), None)


def run(switch: str, folder: str, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Runs the tests of a folder in a process of their own, and returns the number of tests that
    passed, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        report = pathlib.Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", options.jobs, f"--junitxml={report}"]
        marked = [] if options.exhaustive else ["-m", "not exhaustive"]
        done = subprocess.run(
            [*command, *marked, str(TESTS / folder)],
            env={**os.environ, switch.upper(): "1"},
            capture_output=True,
            text=True,
        )
        if not report.exists():
            sys.exit(f"{switch} {folder}: pytest wrote no report\n{done.stdout}{done.stderr}")
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - len(failed) - skipped, failed


if __name__ == "__main__":
    sys.exit(main())
