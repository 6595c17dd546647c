"""``rollbridge coordinator`` and ``rollbridge gateway``: run a service in the foreground, against any cluster."""

from __future__ import annotations

import os
from importlib import import_module

import click

from rollbridge.cli.common import CliContext, ExitCode
from rollbridge.config import CONFIG_VARIABLE

_ANY_ARGUMENTS = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_ANY_ARGUMENTS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def coordinator(context: CliContext, arguments: tuple[str, ...]) -> int:
    """Run a coordinator in the foreground; SIGTERM and Ctrl-C stop it gracefully.

    Other arguments are passed to `python -m rollbridge_coordinator`.
    """
    return _run("coordinator", context, arguments)


@click.command(context_settings=_ANY_ARGUMENTS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def gateway(context: CliContext, arguments: tuple[str, ...]) -> int:
    """Run a gateway in the foreground; SIGTERM and Ctrl-C stop it gracefully.

    Other arguments are passed to `python -m rollbridge_gateway`.
    """
    return _run("gateway", context, arguments)


def _run(service: str, context: CliContext, arguments: tuple[str, ...]) -> int:
    """Run a service with the addresses that the command line has found, and return its exit code."""
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
        # For settings without an option: security, which must not be on a command line that others can see.
        os.environ[CONFIG_VARIABLE] = str(context.config_file)
    # Imported by name: services depend on this package, not the other way round.
    entry = import_module(f"rollbridge_{service}.__main__")
    try:
        entry.main(args=arguments, prog_name=f"rollbridge {service}")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return ExitCode.OK
