"""A process that forks: the child is told to connect again, and nothing of the parent's is lost or ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.forking import RECORDS
from integration_tests.patience import PATIENCE_S
from rollbridge.base.sn import DLSN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_shares_nothing_with_its_parent(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    servers = {
        "bootstrap.servers": site.cluster.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "zookeeper.root": site.root,
    }
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.forking", ledger, json.dumps(servers)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2, done.stderr
    child, parent = map(json.loads, done.stdout.splitlines())
    assert {name: said for name, said in child["met"].items() if "connect again" not in said} == {}
    assert parent["status"] == 0, "the child ended as it wanted to"
    assert len({child["child"], *parent["ids"]}) == 3, "no transaction id was used twice"
    with client.reader(ledger, follow=False) as reader:
        records = {str(DLSN(item.epoch, item.segment.number, item.offset or 0)): item.value for item in reader}
    assert [records.get(place) for place in parent["places"]] == [b"%d" % number for number in range(RECORDS)]
    values = list(records.values())
    assert b"of the child" not in values
    for value in (b"before the fork", b"of the open one", b"of a connection of the child", b"later", b"by a condition"):
        assert values.count(value) == 1
