"""``python -m rollbridge_gateway``: run a gateway until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Final

import click

from rollbridge.config import CONFIG_VARIABLE, load_settings
from rollbridge.errors import RollbridgeError
from rollbridge.logs import is_json, set_up_service_log
from rollbridge.model.text import printable
from rollbridge_gateway.settings import GatewaySettings
from rollbridge_gateway.shell.daemon import run

logger = logging.getLogger(__name__)

PREFIX: Final = "ROLLBRIDGE_GATEWAY"
"""Of variables: each option may be given as one, such as ``ROLLBRIDGE_GATEWAY_LISTEN``."""


@click.command(name="gateway", context_settings={"auto_envvar_prefix": PREFIX})
@click.option("--bootstrap-servers", default=None, help="Kafka brokers, host:port,...")
@click.option("--zookeeper", default=None, help="ZooKeeper servers, host:port,...")
@click.option("--zookeeper-root", default=None, help="Root path in ZooKeeper (default: /rollbridge).")
@click.option("--listen", help="Address of the first port; brokers get the ports behind it (default: 127.0.0.1:9192).")
@click.option("--advertise", metavar="HOST", help="Host that clients are told (default: that of --listen).")
@click.option("--name", help="Name among the gateways (default: host and process id).")
@click.option("--partitions", type=int, help="Virtual partitions of a stream with key ranges (default: 8).")
@click.option("--session-timeout", "session_timeout_s", type=float, help="ZooKeeper session time-out (default: 4 s).")
@click.option("--connections-max", type=int, help="Most connections of clients (default: 2,000).")
@click.option("--connections-per-ip-max", type=int, help="Most of one address (default: half of all).")
@click.option("--ids-max", type=int, help="Most transactional ids served at once (default: 50,000).")
@click.option("--request-bytes-max", type=int, help="Largest request (default: 100 MiB).")
@click.option("--under-way-bytes-max", type=int, help="Bytes of all requests under way (default: 256 MiB).")
@click.option("--answer-bytes-max", type=int, help="Bytes of answers not taken yet (default: 256 MiB).")
@click.option("--writers", type=int, help="Threads for what may take long to write (default: 8).")
@click.option("--workers", type=int, help="Threads that wait for leaders and ZooKeeper (default: 64).")
@click.option("--certificate", metavar="FILE", help="Certificate, if clients' connections are to be encrypted.")
@click.option("--key", metavar="FILE", help="Its private key, unless it stands in the same file.")
@click.option("--client-ca", metavar="FILE", help="Authorities of clients' certificates, which are demanded then.")
@click.option("--rights-seconds", "rights_s", type=float, help="Time for which rights are remembered (default: 60 s).")
@click.option("--idle-seconds", "idle_s", type=float, help="Time until an idle connection is closed (default: 600 s).")
@click.option("--request-seconds", "request_s", type=float, help="Time to go on with a request (default: 30 s).")
@click.option(
    "--expiration-days", type=float, help="Unused transactional ids are forgotten then (default: 7; 0: never)."
)
@click.option(
    "--metrics",
    envvar=f"{PREFIX}_METRICS_ADDRESS",
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus, and health.",
)
@click.option("--probe-socket", metavar="FILE", help="Answer probes of this machine at this Unix socket.")
@click.option("--log-level", default="INFO", show_default=True, help="DEBUG, INFO, WARNING or ERROR.")
@click.option("--log-format", default=None, help="text or json (default: text).")
@click.option("--log-file", default=None, help="Log to this file, which may be moved meanwhile.")
def main(
    bootstrap_servers: str | None,
    zookeeper: str | None,
    zookeeper_root: str | None,
    log_level: str,
    log_format: str | None,
    log_file: str | None,
    **given: str | int | float | None,
) -> None:
    """Run a gateway: transactional Kafka producers write rolling transactions through it."""
    try:
        set_up_service_log(logger, log_level, {"format": log_format, "file": log_file})
        flags = {
            "bootstrap_servers": bootstrap_servers,
            "zookeeper": zookeeper,
            "zookeeper_root": zookeeper_root,
        }
        file = os.environ.get(CONFIG_VARIABLE)
        connection = load_settings(flags, config_file=Path(file) if file else None)
        wanted = {key: value for key, value in given.items() if value is not None}
        run(GatewaySettings(connection=connection, **wanted), click.echo)  # type: ignore[arg-type]
    except RollbridgeError as fault:
        logger.error("it ends: %s", fault)
        if not is_json():
            click.echo(printable(f"rollbridge gateway: {fault}"), err=True)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
