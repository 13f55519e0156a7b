"""One step on many chips: what it sends between them.

    from fnet import parallel
"""

from fnet.parallel._ledger import Ledger, Transfer, ledger

__all__ = ["Ledger", "Transfer", "ledger"]
