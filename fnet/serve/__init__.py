"""Serves models: an engine that generates the texts of many requests together, and a server for
exported models (bundles), which needs the packages starlette and uvicorn.

    engine = serve.Engine(model, params, slots=8)             # continuous batching, as a library

    fnet serve digits.fnet                                    # a bundle
    fnet serve SmolLM2-135M-Instruct                          # a language model from a folder

    serve.run(["digits.fnet"], serve.Options(port=8000))      # the same from Python
    app = serve.application(["digits.fnet"])                  # an ASGI application

    mask = serve.json_schema(schema, tokenizer)               # texts that are what you need
    engine.submit(prompt, max_tokens=64, mask=mask)

It combines requests into batches, speaks the Open Inference Protocol and, for language models and
encoders of texts, OpenAI's API, streams generated texts, and reports metrics. `docs/how_to/serve.md` describes it.
"""

from fnet.serve._application import application
from fnet.serve._batching import Full
from fnet.serve._engine._engine import Engine
from fnet.serve._engine._request import Finished, Mask, Request, Token
from fnet.serve._engine._stats import Histogram, Stats
from fnet.serve._options import Options
from fnet.serve._run import run
from fnet.serve._structured._grammar import Grammar, choice, json_schema, lark, regex

__all__ = [
    "Engine",
    "Finished",
    "Full",
    "Grammar",
    "Histogram",
    "Mask",
    "Options",
    "Request",
    "Stats",
    "Token",
    "application",
    "choice",
    "json_schema",
    "lark",
    "regex",
    "run",
]
