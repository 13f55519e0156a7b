"""`fnet serve FILE...`: serves bundles over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """Serves bundles by the Open Inference Protocol, version 2 (REST), and language models and text
encoders, from folders of Hugging Face or bundles with a tokenizer, by the API of OpenAI. Needs starlette and uvicorn.

  fnet serve digits.fnet                          http://127.0.0.1:8000, with a page for trying the model
  fnet serve SmolLM2-135M-Instruct                base_url="http://127.0.0.1:8000/v1", model="SmolLM2-135M-Instruct"
  fnet serve base --adapters french=lora          adapters are models of their own: model="french"
  fnet serve digits=new.fnet digits:1=old.fnet    two versions of a model
  fnet serve bert.fnet --pad t=32,64,128          inputs padded to few sizes, all compiled at the start

The token for clients, if any, is in the file of --token-file or in the environment variable FNET_SERVE_TOKEN.
It is the api_key of OpenAI's clients.
"""


def define(commands: Any) -> None:
    """Adds the command `serve` to the parser of `fnet`."""
    serve = commands.add_parser(
        "serve",
        help="serve exported models over HTTP",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="bundle to serve, as FILE, NAME=FILE or NAME:VERSION=FILE; or folder of weights, as "
        "FOLDER or NAME=FOLDER",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address of the server (default: %(default)s)"
    )
    serve.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port of the server; 0 selects a free port (default: %(default)s)",
    )
    serve.add_argument(
        "--max-batch", type=int, default=32, help="maximum number of rows in a batch (default: 32)"
    )
    serve.add_argument(
        "--max-delay",
        type=float,
        default=2.0,
        metavar="MS",
        help="maximum time in milliseconds for which a request waits for other requests (default: 2)",
    )
    serve.add_argument(
        "--max-queue",
        type=int,
        default=256,
        help="maximum number of requests that wait for a model (default: 256)",
    )
    serve.add_argument(
        "--max-body",
        type=float,
        default=64,
        metavar="MB",
        help="maximum size of a request in megabytes (default: 64)",
    )
    serve.add_argument(
        "--timeout", type=float, default=30, help="time limit of a request in seconds (default: 30)"
    )
    serve.add_argument(
        "--pad",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="sizes to which a size variable is padded, such as t=32,64,128; the smallest sufficient "
        "size is used, if the padding is proved to reach no output",
    )
    serve.add_argument(
        "--assume-independent-rows",
        action="store_true",
        help="combine requests although the rows of a model are not proved to be independent; if "
        "they are not, clients see what others sent",
    )
    serve.add_argument(
        "--slots",
        type=int,
        default=8,
        help="texts of a language model that are generated together (default: 8)",
    )
    serve.add_argument(
        "--context",
        type=int,
        help="maximum number of tokens of a prompt and its answer (default: that of the model, at "
        "most 1024)",
    )
    serve.add_argument(
        "--warm",
        type=int,
        default=0,
        metavar="TOKENS",
        help="compile the programs for texts of up to so many tokens before the first request "
        "(default: when a request needs them)",
    )
    serve.add_argument(
        "--dtype",
        help="dtype to which the weights in folders are cast, such as float32 (default: theirs)",
    )
    serve.add_argument(
        "--adapters",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="LoRA adapter of the folder that is served, offered as a model of its own",
    )
    serve.add_argument("--token-file", help="file with the token that clients must send")


def run(args: argparse.Namespace) -> int:
    """Runs the command `fnet serve` and returns its exit code."""
    from fnet import serve

    token = os.environ.get("FNET_SERVE_TOKEN")
    if args.token_file:
        token = Path(args.token_file).read_text(encoding="utf-8").strip()
    options = serve.Options(
        host=args.host,
        port=args.port,
        max_batch=args.max_batch,
        max_delay=args.max_delay / 1000,
        max_queue=args.max_queue,
        max_body=int(args.max_body * 1e6),
        timeout=args.timeout,
        token=token or None,
        pad=dict(map(_sizes, args.pad)),
        assume_independent_rows=args.assume_independent_rows,
        slots=args.slots,
        context=args.context,
        warm=args.warm,
        dtype=args.dtype,
        adapters=dict(map(_adapter, args.adapters)),
    )
    if not options.loopback and options.token is None:
        print(
            f"fnet serve: all clients that reach {options.host} can use the models; set a token "
            f"with --token-file",
            file=sys.stderr,
        )
    serve.run(
        args.files, options, started=lambda address: print(f"serving on {address}", flush=True)
    )
    return 0


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError(f"--adapters={text}: expected NAME=FOLDER")
    return name, folder


def _sizes(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.partition("=")
    try:
        return name, tuple(int(size) for size in sizes.split(","))
    except ValueError:
        raise ValueError(f"--pad={text}: expected a name and sizes, such as t=32,64,128") from None
