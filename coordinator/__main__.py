"""``python -m coordinator``: run a coordinator until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import signal
import sys

import click

from bridge.config import load_settings
from bridge.errors import RollbridgeError
from coordinator.config import CoordinatorSettings
from coordinator.daemon import Daemon

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(threadName)s %(name)s: %(message)s"


@click.command(name="coordinator")
@click.option("--bootstrap-servers", required=True, help="Kafka brokers, host:port,...")
@click.option("--zookeeper", required=True, help="ZooKeeper servers, host:port,...")
@click.option(
    "--zookeeper-root",
    default="/rollbridge",
    show_default=True,
    envvar="ROLLBRIDGE_ZOOKEEPER_ROOT",
    help="Path under which everything stands.",
)
@click.option("--name", default=None, help="Name among the coordinators (default: host and process id).")
@click.option(
    "--session-timeout",
    default=6.0,
    show_default=True,
    envvar="ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT",
    help="ZooKeeper session time-out in seconds: how soon another coordinator takes over.",
)
@click.option("--log-level", default="INFO", show_default=True, help="DEBUG, INFO, WARNING or ERROR.")
def main(
    bootstrap_servers: str,
    zookeeper: str,
    zookeeper_root: str,
    name: str | None,
    session_timeout: float,
    log_level: str,
) -> None:
    """Run a coordinator: lead transaction groups, merge, scale and roll."""
    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    try:
        more = {} if name is None else {"name": name}
        # Security comes from where clients have it from, too: the environment or the TOML file that it names.
        connection = load_settings(
            {"bootstrap_servers": bootstrap_servers, "zookeeper": zookeeper, "zookeeper_root": zookeeper_root}
        )
        settings = CoordinatorSettings(
            bootstrap_servers=connection.bootstrap_servers,
            zookeeper=connection.zookeeper,
            zookeeper_root=connection.zookeeper_root,
            security=connection.kafka,
            session_timeout_s=session_timeout,
            **more,  # type: ignore[arg-type]
        )
        daemon = Daemon(settings)
        signal.signal(signal.SIGTERM, lambda _number, _frame: daemon.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: daemon.stop())
        daemon.run()
    except RollbridgeError as fault:
        click.echo(f"rollbridge coordinator: {fault}", err=True)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
