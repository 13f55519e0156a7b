"""A server for exported models (bundles), which needs the packages starlette and uvicorn.

    fnet serve digits.fnet

    serve.run(["digits.fnet"], serve.Options(port=8000))      # the same from Python
    app = serve.application(["digits.fnet"])                  # an ASGI application

It combines requests into batches, speaks the Open Inference Protocol, streams generated texts, and
reports metrics. `docs/how_to/serve.md` describes it.
"""

from fnet.serve._application import application
from fnet.serve._options import Options
from fnet.serve._run import run

__all__ = ["Options", "application", "run"]
