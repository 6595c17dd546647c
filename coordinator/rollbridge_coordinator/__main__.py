"""``python -m rollbridge_coordinator``: run a coordinator until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Final

import click

from rollbridge.base.logs import is_json, set_up_service_log
from rollbridge.base.text import printable
from rollbridge.errors import RollbridgeError
from rollbridge_coordinator.config import load_coordinator_settings
from rollbridge_coordinator.core.interpreter import Hook
from rollbridge_coordinator.daemon.main import Daemon, end_on_signals, leave

logger = logging.getLogger(__name__)

YOUNG_MAX: Final = 20_000
"""Objects allocated and not freed after which Python collects garbage. A round makes some thousands, freed without it;
with Python's 700, collection took a fifth of a leader's time.
"""


@click.command(name="coordinator")
@click.option("--bootstrap-servers", default=None, help="Kafka brokers, host:port,...")
@click.option("--zookeeper", default=None, help="ZooKeeper servers, host:port,...")
@click.option("--zookeeper-root", default=None, help="Root path in ZooKeeper (default: /rollbridge).")
@click.option("--name", default=None, help="Name among the coordinators (default: host and process id).")
@click.option(
    "--session-timeout",
    "session_timeout_s",
    type=float,
    default=None,
    help="ZooKeeper session time-out in seconds, how soon another coordinator takes over (default: 6).",
)
@click.option("--log-level", default="INFO", show_default=True, help="DEBUG, INFO, WARNING or ERROR.")
@click.option("--log-format", default=None, help="text or json (default: text).")
@click.option("--log-file", default=None, help="Log to this file, which may be moved meanwhile.")
@click.pass_obj
def main(
    hook: Hook | None,
    /,
    log_level: str,
    log_format: str | None,
    log_file: str | None,
    **flags: str | float | None,
) -> None:
    """Run a coordinator: lead transaction groups, merge, scale and roll.

    Limits and delays come from ROLLBRIDGE_COORDINATOR_... variables or the [coordinator] table of the TOML file that
    ROLLBRIDGE_CONFIG names.
    """
    try:
        set_up_service_log(logger, log_level, {"format": log_format, "file": log_file})
    except RollbridgeError as fault:
        click.echo(printable(f"rollbridge coordinator: {fault}"), err=True)
        sys.exit(fault.exit_code)
    spare_collector()
    try:
        daemon = Daemon(load_coordinator_settings(flags), hook)
        end_on_signals(daemon.stop, lambda: daemon.is_serving)
        if not daemon.run():
            # Skip the interpreter's own exit: librdkafka would wait up to a minute for brokers that do not answer.
            leave()
    except RollbridgeError as fault:
        # In the log for its collector; and on stderr for the terminal.
        logger.error("coordinator.stopped: %s", fault)
        if not is_json():
            click.echo(printable(f"rollbridge coordinator: {fault}"), err=True)
        sys.exit(fault.exit_code)


def spare_collector() -> None:
    """Exclude the objects loaded so far from garbage collection, and collect the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MAX, *gc.get_threshold()[1:])


if __name__ == "__main__":
    main()
