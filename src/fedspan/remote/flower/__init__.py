"""fedspan on Flower: the same loop and the same client work, with the messages of a round as Flower messages.

    app = server_app("spec.toml")        app = client_app("spec.toml")

Both ends read the same spec. A client is known by its number (`partition-id` in the node's config) and a permanent name
(`client-id`, by default `client-<number>`), whatever node id Flower assigns. Its state stays on its own machine.
"""

from __future__ import annotations

import time

import torch

from fedspan.core.errors import FedspanError

try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as missing:
    raise FedspanError("Flower is not installed; pip install 'fedspan[flower]'") from missing

from fedspan.remote.flower.client import App, identify, load_spec, reply_to
from fedspan.remote.flower.records import RunConfig
from fedspan.remote.flower.server import log, serve

LOG_SECONDS = 3.0  # in which Flower sends the last lines of its log


def server_app(spec: App) -> ServerApp:
    """A Flower ServerApp that runs a spec.

    Args:
        spec: A spec, or the path of its TOML file. The run config key `set` can change it.

    Returns:
        The app, to be named as `serverapp` in the `pyproject.toml` of a Flower app.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            config = RunConfig.read(context.run_config)
            with torch.inference_mode(False):
                serve(load_spec(spec, config.changes), grid, config)
        except FedspanError as error:
            log.error("fedspan error: %s", error)
            time.sleep(LOG_SECONDS)  # else `flwr log` ends before the reason
            raise SystemExit(2) from None

    return app


def client_app(spec: App) -> ClientApp:
    """A Flower ClientApp that does the work of the client named in the config of its node.

    Args:
        spec: The spec of the server, or the path of its TOML file.

    Returns:
        The app, to be named as `clientapp` in the `pyproject.toml` of a Flower app.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(identify(context), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(reply_to(message, context, spec), reply_to=message)

    return app
