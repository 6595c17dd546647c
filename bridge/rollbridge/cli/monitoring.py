"""``rollbridge monitoring``: write alert rules and a board."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from rollbridge.cli.common import CliContext
from rollbridge.errors import ConflictError, LocalEnvironmentError
from rollbridge.monitoring.runbook import DOCS, board, rules

RULES_FILE: Final = "rollbridge-rules.yaml"
BOARD_FILE: Final = "rollbridge-board.json"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--docs", default=DOCS, show_default=True, help="Address of the runbook to which alerts link.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there with other content.")
@click.pass_obj
def monitoring(context: CliContext, directory: Path, docs: str, overwrite: bool) -> None:
    """Write alert rules for Prometheus and a board for Grafana into a directory. Needs no cluster.

    Files that have been changed by hand are not replaced without --overwrite, and then nothing is written.
    """
    texts = {directory / RULES_FILE: rules(docs), directory / BOARD_FILE: board()}
    try:
        others = [path for path, text in texts.items() if path.exists() and path.read_text(encoding="utf-8") != text]
        if others and not overwrite:
            raise ConflictError(
                f"{', '.join(map(str, others))}: there, with other content; nothing was written; "
                "--overwrite replaces it"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            draft = path.with_name(f".{path.name}.draft")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    except OSError as exc:
        raise LocalEnvironmentError(f"{directory} cannot be written to: {exc}") from exc
    context.answer({"written": [str(path) for path in texts]}, "\n".join(f"Wrote {path}." for path in texts))
