"""The option ``validate``: a leader whose state contradicts itself gives its group up, and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.coordinators import VALIDATING, controller_epoch
from integration_tests.patience import eventually
from rollbridge.stream.names import GroupName

IMPOSSIBLE = {"CONSTANT_MERGES_BESIDE_MAX": "-1"}
"""A bound that every state breaks, and nothing else minds."""


@pytest.mark.logs_defects
def test_a_leader_whose_state_contradicts_itself_gives_its_group_up(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("validated")
    with Site(cluster, f"/{scope}", tmp_path, **IMPOSSIBLE) as site, site.connect("app") as client:
        group = GroupName(scope)
        client._metadata.ensure_group(group)
        eventually(
            lambda: controller_epoch(client._metadata.session, group) >= 2, "the lead is given up and taken again"
        )
        assert "merges in the background are more than -1" in site.said()


def test_nothing_is_checked_unless_it_is_asked_for(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("unvalidated")
    unchecked = dict.fromkeys(VALIDATING, "false")
    with Site(cluster, f"/{scope}", tmp_path, **IMPOSSIBLE, **unchecked) as site, site.connect("app") as client:
        client.admin.create_stream(f"{scope}/orders")
        with client.transaction(f"{scope}/orders") as transaction:
            transaction.write(f"{scope}/orders", b"k", b"v")
        assert transaction.result().records == 1
