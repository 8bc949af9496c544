"""fedspan on Flower: the same loop and the same client end, with letters as Flower messages.

    app = server_app("spec.toml")        app = client_app("spec.toml")

Both ends read the same spec. A client is known by its number (`partition-id` in the node's config) and a name that
stays (`client-id`, else `client-<number>`), whatever node id Flower gives it. Its state is kept in a folder of its own
machine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fedspan.api.spec import Spec
from fedspan.core.errors import FedspanError

try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as missing:
    raise FedspanError("Flower is not installed; pip install 'fedspan[flower]'") from missing

from fedspan.remote.flower.client import introduce, reply_to
from fedspan.remote.flower.records import settings_of, spec_of
from fedspan.remote.flower.server import log, serve


def server_app(spec: Spec | Path | str) -> ServerApp:
    """A Flower ServerApp that carries out a spec."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            settings = settings_of(context.run_config)
            with torch.inference_mode(False):
                serve(spec_of(spec, settings), grid, settings)
        except FedspanError as error:
            log.error("fedspan error: %s", error)
            raise SystemExit(2) from None

    return app


def client_app(spec: Spec | Path | str) -> ClientApp:
    """A Flower ClientApp that answers for the client its node's config names."""
    app = ClientApp()

    @app.query()
    def who(message: Message, context: Context) -> Message:
        return Message(introduce(context), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(reply_to(message, context, spec), reply_to=message)

    return app
