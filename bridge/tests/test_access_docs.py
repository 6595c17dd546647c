"""docs/security.md says of every node and topic who may write it, and says of the nodes what the code grants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kazoo.security import Permissions

from rollbridge.base.ids import SegmentId
from rollbridge.metadata import paths
from rollbridge.metadata.acls import GRANTED, GRANTED_TO_GATEWAYS
from rollbridge.stream import names

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
WORDS = {Permissions.WRITE: "write", Permissions.CREATE: "create", Permissions.DELETE: "delete"}


def documented() -> dict[str, str]:
    """What members may do with each node or topic, by its name with everything that it is below."""
    section = PAGE.partition("### Who writes what")[2].partition("\n## ")[0]
    found = {}
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \| .* ?\|$", section, re.MULTILINE):
        before = ""
        for title in re.findall(r"`([^`]+)`", cells[0]):
            whole = before + title.removeprefix("…") if title.startswith("…") else title
            before = before or whole
            found[whole] = cells[1]
    return found


def test_every_node_has_a_row() -> None:
    laid_out = re.findall(r"^    (/\S*) ", paths.__doc__ or "", re.MULTILINE)
    assert len(laid_out) > 20
    missing = [node for node in laid_out if not {node, node.rpartition("/")[0]} & documented().keys()]
    assert missing == []


def test_every_kind_of_topic_has_a_row() -> None:
    stream, group = names.StreamName("SCOPE", "STREAM"), names.GroupName("SCOPE", "GROUP")
    topics = [stream.buffer_topic(), group.commit_log_topic, group.terminated_topic]
    topics.append(stream.segment_topic(SegmentId.of(0, 0)).replace("-0", "-N", 1).replace("-0", "-E"))
    snapshots = names.snapshot_topic, names.snapshot_segments_topic, names.snapshot_indexes_topic
    topics += [topic("SCOPE") for topic in snapshots]
    assert [topic for topic in topics if topic not in documented()] == []


@pytest.mark.parametrize("node", GRANTED)
def test_what_is_granted_is_what_is_documented(node: str) -> None:
    rights = documented()[node].partition(";")[0]
    assert set(rights.split(", ")) == {word for bit, word in WORDS.items() if GRANTED[node] & bit}


def test_nothing_else_is_said_to_be_granted() -> None:
    rows = documented()
    nodes = {node for node, may in rows.items() if node.startswith("/") and not may.startswith("nothing")}
    assert nodes == set(GRANTED)
    assert rows[paths.TRANSACTION_COUNTER].startswith("nothing; ")


@pytest.mark.parametrize("node", GRANTED_TO_GATEWAYS)
def test_what_gateways_are_granted_is_said_to_be_theirs(node: str) -> None:
    (may,) = {may for title, may in documented().items() if title.startswith(f"{node}/")}
    assert may.startswith("nothing; those granted `gateways` may create")
