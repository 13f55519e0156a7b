"""A server for bundles (exported models), which needs the packages starlette and uvicorn.

The server combines requests into batches, implements the Open Inference Protocol, streams generated
texts, and reports metrics.

    fnet serve digits.fnet

    serve.run(["digits.fnet"], serve.Options(port=8000))      # the same server, started from Python
    app = serve.application(["digits.fnet"])                  # an ASGI application
"""

from fnet.serve._application import application
from fnet.serve._options import Options
from fnet.serve._run import run

__all__ = ["Options", "application", "run"]
