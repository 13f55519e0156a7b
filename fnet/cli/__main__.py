"""`python -m fnet.cli` is the command `fnet`."""

import sys

from fnet.cli import main

if __name__ == "__main__":
    sys.exit(main())
