"""A stream is deleted, or its topic released, while its leader has not read a commit that came in meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import coordinator, until
from integration_tests.patience import PATIENCE_S
from integration_tests.pauses import is_stopped
from rollbridge.errors import RollbridgeError, TransactionAbortedError

DOOMED = "delete_stream/Write:before"
"""Where a leader has seen that no transaction is open, and takes the stream out of its group next."""


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with another stream"])
def test_a_commit_whose_buffer_is_deleted_unread_ends_as_aborted_and_holds_up_no_other(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, both: bool
) -> None:
    scope, root = unique_name("scope"), f"/{unique_name('doomed')}"
    doomed, other = f"{scope}/doomed", f"{scope}/other"
    with (
        closing(patient_client(cluster, root)) as client,
        coordinator(cluster, root, "first", tmp_path, arguments=["--session-timeout=60"], STOP_AT=DOOMED) as first,
    ):
        for stream in (doomed, other):
            client.admin.create_stream(stream, segments=1)
        later = client.begin(other)

        def delete() -> None:
            with suppress(RollbridgeError):
                client.admin.delete_stream(doomed)

        deleting = threading.Thread(target=delete)
        deleting.start()
        until(lambda: is_stopped(first))
        lost = client.begin(doomed, other) if both else client.begin(doomed)
        lost.write(doomed, key=b"k", value=b"lost")
        if both:
            lost.write(other, key=b"k", value=b"lost")
        outcome = lost.commit_async()
        lost.flush()  # acknowledged, and what nobody reads
        later.write(other, key=b"k", value=b"later")
        last = later.commit_async()
        os.kill(first.pid, signal.SIGCONT)
        deleting.join(PATIENCE_S)
        with pytest.raises(TransactionAbortedError, match="was deleted"):
            outcome.result(30)
        last.result(30)
        with client.reader(other, follow=False) as reader:
            assert [record.value for record in reader] == [b"later"]
        assert client.outcome(later.id).state == "committed"
