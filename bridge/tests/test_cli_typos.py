"""What names nothing is not answered as if it were there: by its exit code, or by what is said to have been done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.tests.admin_makers import GROUP, ORDERS, Stored, make_admin
from rollbridge.cli import consume, doctor, stream, txn
from rollbridge.cli.common import ExitCode
from rollbridge.cli.main import main
from rollbridge.client.admin import Admin
from rollbridge.errors import StreamNotFoundError
from rollbridge.metadata.records import Group, TransactionRecord
from rollbridge.metadata.requests import AdminAnswer, AdminRequest
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName, StreamName

ADOPTED = StreamName("sales", "adopted")


class Found(Stored):
    """ZooKeeper with one stream, of the scope sales, and its group."""

    def name_of(self, name: str) -> StreamName:
        if "/" not in name:
            raise StreamNotFoundError(f"no stream has adopted topic {name}")
        return StreamName.parse(name)

    def scopes(self) -> list[str]:
        return [ORDERS.scope]

    def stream(self, name: StreamName) -> Any:
        found = super().stream(name)
        return {ORDERS: found, ADOPTED: replace(found, topic="adopted", partitioner="murmur2")}.get(name)

    def streams(self, scope: str | None) -> list[StreamConfig]:
        return [self.stream(ORDERS)] if scope in (None, ORDERS.scope) else []

    def require_layout(self) -> None:
        pass

    def group(self, name: GroupName) -> Any:
        return super().group(name) if name == GROUP else None

    def groups(self) -> list[GroupName]:
        return [GROUP]

    def group_records(self) -> dict[GroupName, Group]:
        return {GROUP: super().group(GROUP)}

    def transactions(self, _: GroupName) -> list[TransactionRecord]:
        return []

    def ask(self, _: GroupName, request: AdminRequest, __: float) -> AdminAnswer:
        request.to_json()
        return AdminAnswer(ok=True, answered_ms=0)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    """Commands that are connected to this ZooKeeper."""
    admin = make_admin()
    monkeypatch.setattr(admin, "_zookeeper", Found())

    @contextmanager
    def connected(_: object) -> Iterator[Any]:
        yield SimpleNamespace(admin=admin)

    for module in (consume, doctor, stream, txn):
        monkeypatch.setattr(module, "connected", connected)
    return admin


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("txn list --group nope/nope", ExitCode.NOT_FOUND),
        ("txn list --group sales/default", ExitCode.OK),
        ("txn list --stream no/pe", ExitCode.NOT_FOUND),
        ("txn list --stream sales/orderz", ExitCode.NOT_FOUND),
        ("txn list --stream orders", ExitCode.NOT_FOUND),
        ("txn list --stream sales/orders", ExitCode.OK),
        ("snapshot list --scope nope", ExitCode.NOT_FOUND),
        ("consume sales/orders/9/#epoch.0 --segment", ExitCode.NOT_FOUND),
        (f"consume sales/orders/9/#epoch.0/#transaction.{7:032x} --segment", ExitCode.NOT_FOUND),
        ("stream delete nope/x --yes", ExitCode.NOT_FOUND),
        ("stream release nope", ExitCode.NOT_FOUND),
    ],
)
def test_a_name_of_nothing_is_not_found(
    arguments: str, code: ExitCode, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == code
    assert bool(capsys.readouterr().out) == (code is ExitCode.OK)


@pytest.mark.parametrize(
    ("arguments", "what", "is_done"),
    [
        ("stream delete nope/x --yes", "deleted", False),
        ("stream delete nope --yes", "deleted", False),
        ("stream delete sales/orders --yes", "deleted", True),
        ("stream release nope", "released", False),
        ("stream release nope/x", "released", False),
        ("stream release sales/adopted", "released", True),
    ],
)
def test_what_was_not_there_is_said_not_to_have_been_done(
    arguments: str, what: str, is_done: bool, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [*arguments.split(), "--if-exists"]
    assert main(["--json", *whole]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)[what] is is_done
    assert main(whole) == ExitCode.OK
    assert ("nothing was done" in capsys.readouterr().out) is not is_done


def test_a_stream_without_a_topic_is_not_released(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stream", "release", "sales/orders"]) == ExitCode.REFUSED
    assert capsys.readouterr().err.endswith("stream sales/orders has not adopted a topic; nothing was done\n")
