"""Many small transactions at once, whose frames are joined on the way: into requests, and into batches of a segment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site

TRANSACTIONS = 500
RECORDS = 5


@pytest.mark.parametrize(
    ("segments", "record_bytes_max", "cache_bytes_max"),
    [
        pytest.param(1, 0, None, id="one segment"),
        pytest.param(3, 0, None, id="three segments"),
        pytest.param(1, 1_000, None, id="small records only"),
        pytest.param(3, 0, 10_000, id="frames that do not fit into memory"),
    ],
)
def test_all_of_them_commit_whole_and_in_order(
    cluster: AnyCluster,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segments: int,
    record_bytes_max: int,
    cache_bytes_max: int | None,
) -> None:
    if cache_bytes_max is not None:
        monkeypatch.setenv("ROLLBRIDGE_COORDINATOR_CACHE_BYTES_MAX", str(cache_bytes_max))
    stream = f"{unique_name('many')}/small"
    with Site(cluster, f"/{unique_name('root')}", tmp_path) as site, site.connect("many") as client:
        client.admin.create_stream(stream, segments=segments, record_bytes_max=record_bytes_max)
        answers = []
        for number in range(TRANSACTIONS):
            transaction = client.begin(stream)
            for count in range(RECORDS):
                transaction.write(stream, key=b"key %d" % count, value=b"%05d " % number + b"v" * 500)
            answers.append(transaction.commit_async())
        positions = [answer.result(60).position for answer in answers]
        assert positions == sorted(positions), "one client's commits keep their order"
        seen: dict[bytes | None, list[int]] = {}
        for message in site.committed(stream):
            seen.setdefault(message.key(), []).append(int((message.value() or b"")[:5]))
        assert seen == {b"key %d" % count: list(range(TRANSACTIONS)) for count in range(RECORDS)}
