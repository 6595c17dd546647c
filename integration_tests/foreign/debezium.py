"""Debezium's connector for PostgreSQL, whose initial snapshot is one transaction, and a history for it.

``SnapshotInOneTransaction.java`` says where transactions end. In the middle of a snapshot the connector waits at a row,
for as long as somebody holds a lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from integration_tests.foreign.connect import ConnectWorker, make_plugin
from integration_tests.patience import eventually
from integration_tests.postgres import LOOPBACK, USER, Postgres
from rollbridge_devcluster.jars import JarCache

ROWS: Final = 20_000
"""What the table has at the beginning."""
_SHOWN: Final = 10_000
"""A row that the connector has certainly written when it waits."""
_GATE: Final = 15_001
"""The row where it waits; what it has read but not yet written is less than what is between them."""
_NEW: Final = range(ROWS + 2, ROWS + 102)
"""Rows that are inserted after the snapshot, each in a transaction of its own."""
_LOCK: Final = 1
_JSON: Final = "org.apache.kafka.connect.json.JsonConverter"
_PROGRAM: Final = Path(__file__).with_name("SnapshotInOneTransaction.java")
# Only the row of the gate asks for the lock, once those before it have gone out: what is sorted is not sorted again.
_SELECT: Final = (
    "SELECT * FROM (SELECT * FROM public.orders ORDER BY id OFFSET 0) sorted "
    f"WHERE CASE WHEN id = {_GATE} THEN pg_advisory_xact_lock_shared({_LOCK})::text = '' ELSE true END"
)

Change = tuple[str, int, str | None]
"""Debezium's letter of an operation (``r``: a row of the snapshot), the row's id, and its item; None if it is gone."""


class OrdersTable:
    """A table ``orders`` and its connector. Its topic is ``PREFIX.public.orders``, its worker's group is the prefix."""

    def __init__(self, database: Postgres, servers: str, prefix: str, folder: Path, timeout_ms: int) -> None:
        """Make the table; ``timeout_ms`` is that of the connector's transactions."""
        self.database = database
        self.prefix = prefix
        self._servers = servers
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._settings = make_plugin(folder / "plugins", _PROGRAM, JarCache.default().ensure("debezium"))
        self._config = {
            "database.hostname": LOOPBACK,
            "database.port": database.port,
            "database.user": USER,
            "database.password": "not asked for",
            "database.dbname": USER,
            "plugin.name": "pgoutput",
            "publication.autocreate.mode": "filtered",
            "topic.prefix": prefix,
            "table.include.list": "public.orders",
            "tombstones.on.delete": "false",
            "snapshot.mode": "initial",
            "snapshot.fetch.size": 1_000,
            "snapshot.select.statement.overrides": "public.orders",
            "snapshot.select.statement.overrides.public.orders": _SELECT,
            "retriable.restart.connector.wait.ms": 500,
            "key.converter": _JSON,
            "value.converter": _JSON,
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "transaction.boundary": "connector",
            "producer.override.transaction.timeout.ms": timeout_ms,
        }
        database.do(
            "CREATE TABLE orders (id integer PRIMARY KEY, item text NOT NULL)",
            "ALTER TABLE orders REPLICA IDENTITY FULL",
            f"INSERT INTO orders SELECT id, 'first' FROM generate_series(1, {ROWS}) id",
        )

    def worker(self) -> ConnectWorker:
        """A worker that runs the connector, or goes on with it."""
        return ConnectWorker(self._servers, self.prefix, self._folder / "connect", self._settings)

    def begin(self, worker: ConnectWorker) -> None:
        """Have a worker run the connector for the first time."""
        worker.connector(self.prefix, "SnapshotInOneTransaction", self._config)

    def break_connections(self) -> None:
        """End the snapshot's session in the database, as an administrator may; Debezium begins anew by itself.

        Sessions of workers that were killed, which wait for the lock as long as that one, end with it.
        """
        asking = "state = 'active' AND query LIKE '%pg_advisory_xact_lock_shared%' AND pid <> pg_backend_pid()"
        ended = self.database.do(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {asking}")
        assert set(ended.split()) == {"t"}


def changes(values: Sequence[bytes]) -> list[Change]:
    """Parse values of the topic that are the connector's, and leave others out."""
    found = [json.loads(value) for value in values if value.startswith(b"{")]
    return [(item["op"], *_row(item)) for item in found]


def _row(change: dict[str, Any]) -> tuple[int, str | None]:
    after = change["after"]
    return (change["before"]["id"], None) if after is None else (after["id"], after["item"])


def play(
    orders: OrdersTable,
    committed: Callable[[], Sequence[bytes]],
    arrived: Callable[[], Sequence[bytes]],
    looked_at: Callable[[], object],
    disturb: Callable[[], object],
) -> None:
    """Three attempts at a snapshot, the first one's worker killed, the second one's session broken; then changes.

    Args:
        orders: Its connector has not begun.
        committed: What a reader of what is committed finds.
        arrived: What is written, at least what is open of it.
        looked_at: Called when each attempt is under way.
        disturb: Called in the middle of the third attempt, and between two changes.
    """
    database = orders.database

    def await_attempt(item: str) -> None:
        """The newest attempt has come up to the gate, and has seen the first row as it is now."""

        def is_there() -> bool:
            found = changes(arrived())
            first: Change = ("r", 1, item)
            return first in found and any(row == _SHOWN for _, row, _ in found[found.index(first) :])

        eventually(is_there, f"the attempt that sees {item} is under way")
        assert changes(committed()) == []
        looked_at()

    def await_changes(count: int) -> None:
        eventually(lambda: len(changes(committed())) >= count, f"{count} changes are written")

    with ExitStack() as gate:
        gate.enter_context(database.holding(_LOCK))
        with orders.worker() as worker:
            orders.begin(worker)
            await_attempt("first")
        database.do(
            "UPDATE orders SET item = 'second' WHERE id = 1",
            "DELETE FROM orders WHERE id = 2",
            f"INSERT INTO orders VALUES ({ROWS + 1}, 'late')",
        )
        with orders.worker():
            await_attempt("second")
            database.do("UPDATE orders SET item = 'third' WHERE id = 1")
            orders.break_connections()
            await_attempt("third")
            disturb()
            gate.close()
            await_changes(ROWS)
            others: list[Change] = [("r", row, "first") for row in range(3, ROWS + 1)]
            assert changes(committed()) == [("r", 1, "third"), *others, ("r", ROWS + 1, "late")]
            database.do("UPDATE orders SET item = 'changed' WHERE id = 3", "DELETE FROM orders WHERE id = 4")
            await_changes(ROWS + 2)
            disturb()
            database.do(*(f"INSERT INTO orders VALUES ({row}, 'new')" for row in _NEW))
    # Killed with some of the new ones written, or none, or all.
    database.do("INSERT INTO orders SELECT id + 1000, 'one transaction' FROM orders WHERE item = 'new' ORDER BY id")
    with orders.worker():
        await_changes(ROWS + 2 + 2 * len(_NEW))
    single: list[Change] = [("c", row, "new") for row in _NEW]
    assert changes(committed())[ROWS:] == [
        ("u", 3, "changed"),
        ("d", 4, None),
        *single,
        *(("c", row + 1_000, "one transaction") for row in _NEW),
    ]
