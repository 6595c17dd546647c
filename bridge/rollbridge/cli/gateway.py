"""``rollbridge gateway``: run a gateway for transactional Kafka producers."""

from __future__ import annotations

import os
from importlib import import_module

import click

from rollbridge.cli.common import CliContext, ExitCode
from rollbridge.config import CONFIG_VARIABLE


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def gateway(context: CliContext, arguments: tuple[str, ...]) -> int:
    """Run a gateway in the foreground; SIGTERM and Ctrl-C stop it gracefully.

    Other arguments are passed to `python -m rollbridge_gateway`.
    """
    if not {"-h", "--help"} & set(arguments):
        settings = context.settings()
        arguments = (
            "--bootstrap-servers",
            settings.bootstrap_servers,
            "--zookeeper",
            settings.zookeeper,
            "--zookeeper-root",
            settings.zookeeper_root,
            *arguments,
        )
    if context.config_file is not None:
        # For settings without an option: security, which must not stand on a command line that others can see.
        os.environ[CONFIG_VARIABLE] = str(context.config_file)
    # Imported by name: the gateway depends on this package, not the other way round.
    entry = import_module("rollbridge_gateway.__main__")
    try:
        entry.main(args=arguments, prog_name="rollbridge gateway")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return ExitCode.OK
