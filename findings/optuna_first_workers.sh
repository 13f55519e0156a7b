#!/bin/sh
# Optuna: of two processes that begin a study in one new SQLite file, one may end with an error, also with load_if_exists=True.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check "optuna==5.0.0"
cd "$folder"
environment/bin/python - <<'PYTHON'
import multiprocessing
import sys

import optuna

PAIRS = 4
processes = multiprocessing.get_context("fork")


def begin(file, barrier, errors):
    barrier.wait()
    try:
        optuna.create_study(storage=f"sqlite:///{file}", study_name="study", load_if_exists=True)
    except Exception as error:
        errors.put(str(error).splitlines()[0])
    else:
        errors.put(None)


def errors(file):
    """Begins one study in two processes at the same time, and returns their errors."""
    barrier, found = processes.Barrier(2), processes.Queue()
    workers = [processes.Process(target=begin, args=(file, barrier, found)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [found.get() for _ in workers]
    for worker in workers:
        worker.join()
    return [each for each in results if each is not None]


optuna.logging.set_verbosity(optuna.logging.ERROR)
print(f"Python {sys.version.split()[0]}, Optuna {optuna.__version__}")
print("create_study(load_if_exists=True) raises an error if another process creates the same SQLite file")
results = [errors(f"study{pair}.db") for pair in range(PAIRS)]
failed = [result for result in results if result]
print(f"{len(failed)} of {PAIRS} pairs of processes have an error, such as:")
for line in sorted({line for result in failed for line in result}):
    print("   ", line)
wrong = bool(failed)
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
