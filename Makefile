# Two commands on a fresh machine:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python experiments/image_classification.py --workdir=runs/digits $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

# The stamp is written last: an installation that was interrupted is taken up again.
$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "fnet needs Python 3.11 or newer; $(PYTHON) is %d.%d: try make PYTHON=python3.12 $(MAKECMDGOALS)" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot create a virtual environment: install its venv package (on Debian and Ubuntu: apt-get install python3-venv), or name another interpreter: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@version=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	pins=constraints/py$$version.txt; \
	[ -f $$pins ] || pins=$$(ls constraints/py*.txt | sort -V | tail -n 1); \
	echo "installing fnet and its test set into $(VENV) ($$pins)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $$pins -e '.[dev,experiments]'
	@touch $@

clean:
	rm -rf .venv* .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
