"""What every command is given: the global options, the settings that follow from them, and how to answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from rollbridge.config import ConnectionSettings, default_home, load_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CliContext:
    """The global options of one call; commands get it with ``@click.pass_obj``."""

    flags: Mapping[str, str | None] = field(default_factory=dict)
    """Connection settings from the command line, by key; ``None`` when not given."""
    config_file: Path | None = None
    named_home: Path | None = None
    """The embedded cluster's directory, if one was named by flag or environment variable."""
    json: bool = False
    """Answer with JSON on standard output."""
    verbosity: int = 0

    @property
    def home(self) -> Path:
        """The directory of the embedded cluster that is meant."""
        return self.named_home or default_home()

    def settings(self) -> ConnectionSettings:
        """Where the cluster is and how to reach it.

        Raises:
            ConfigError: a setting is wrong, or no cluster is named.
        """
        return load_settings(self.flags, config_file=self.config_file, home=self.home)

    def answer(self, document: object, text: str) -> None:
        """Print the result: the document with ``--json``, the text otherwise."""
        click.echo(json.dumps(document, indent=2) if self.json else text)

    def tell(self, line: str) -> None:
        """Print progress, which never mixes with the result: it goes to standard error."""
        click.echo(line, err=True)
