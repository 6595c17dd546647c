"""``rollbridge cas`` and ``rollbridge tail``: write if the log is as expected, and see what it is."""

from __future__ import annotations

import click

from rollbridge.cli import values
from rollbridge.cli.connecting import connected
from rollbridge.cli.context import CliContext
from rollbridge.errors import InvalidRequestError
from rollbridge.model.cas import Scope
from rollbridge.model.sn import SN

_STREAM = click.argument("stream_name", metavar="SCOPE/STREAM")
_KEY = click.option("--key", metavar="TEXT", help="Chooses the segment; may be left out if there is one only.")
_SCOPE = click.option(
    "--scope",
    type=click.Choice([item.value for item in Scope]),
    default=Scope.SEGMENT.value,
    show_default=True,
    help="Whether the last record of the key's segment is meant, or the last one with this key.",
)


@click.command()
@_STREAM
@_KEY
@_SCOPE
@click.pass_obj
def tail(context: CliContext, stream_name: str, key: str | None, scope: str) -> None:
    """Print the SN of the last committed record: what `rollbridge cas --expected` takes.

    It is `empty` if nothing was written yet.
    """
    with connected(context) as b, b.cas_writer(stream_name) as writer:
        found = writer.tail(_bytes(key), scope=scope)
    context.answer(sn_document(found), str(found))


@click.command()
@_STREAM
@click.argument("value", required=False)
@_KEY
@click.option(
    "--expected",
    metavar="SN",
    help="SN of the last record, or one of its members (`seq=N`, `txid=N`); `empty`: there must be none; `any`.",
)
@_SCOPE
@click.option("--transaction-id", type=int, metavar="N", help="A number of yours that becomes part of the SN.")
@click.option("--rising-ids", is_flag=True, help="Refuse a --transaction-id that is lower than the last one.")
@click.option("--header", "headers", type=values.header, multiple=True, metavar="NAME=VALUE", help="May be repeated.")
@click.option("--outcome", metavar="TOKEN", help="Write nothing, but ask what became of the write with this token.")
@click.pass_obj
def cas(
    context: CliContext,
    stream_name: str,
    value: str | None,
    key: str | None,
    expected: str | None,
    scope: str,
    transaction_id: int | None,
    rising_ids: bool,
    headers: tuple[tuple[str, bytes], ...],
    outcome: str | None,
) -> None:
    """Write VALUE if the last record is the expected one, and print the SN of the new record.

    If it is not, nothing is written, the exit code is 5, and the error names the SN that is there. If nobody can tell
    whether it was written, the exit code is 6, and the error holds the token to ask again with.
    """
    if outcome is not None:
        if value is not None or expected is not None:
            raise click.UsageError("--outcome asks about a write; it goes with neither VALUE nor --expected")
        with connected(context) as b, b.cas_writer(stream_name) as writer:
            found = writer.outcome(outcome)
        context.answer(
            {"written": found is not None, **({} if found is None else sn_document(found))},
            "It was not written." if found is None else str(found),
        )
        return
    if value is None or expected is None:
        raise click.UsageError("VALUE and --expected are needed; `rollbridge tail` says what to expect")
    try:
        wanted = SN.parse(expected)
    except InvalidRequestError as fault:
        raise click.BadParameter(str(fault)) from None
    with connected(context) as b, b.cas_writer(stream_name, rising_ids=rising_ids) as writer:
        sn = writer.write(
            _bytes(key),
            _bytes(value),
            expected=wanted,
            scope=scope,
            headers=headers,
            transaction_id=transaction_id,
        )
    context.answer(sn_document(sn), str(sn))


def sn_document(sn: SN) -> dict[str, object]:
    """An SN as JSON: its text, and its members."""
    return {
        "sn": str(sn),
        "empty": sn.empty,
        "dlsn": None if sn.dlsn is None else str(sn.dlsn),
        "transaction_id": sn.transaction_id,
        "sequence_id": sn.sequence_id,
    }


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")
