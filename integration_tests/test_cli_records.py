"""``rollbridge produce``, ``consume``, ``cas`` and ``tail`` against a real cluster."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from integration_tests.grown_streams import KEYS, grow, write
from integration_tests.kafka_tools import producer_config
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.cli.common import ExitCode


@pytest.fixture
def stream(orders: str) -> str:
    return orders


def by_key(out: str) -> dict[str, list[str]]:
    """Values of each key in the order of the lines ``key=value``."""
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key, []).append(value)
    return found


def grown(client: rollbridge.Bridge, stream: str) -> list[str]:
    """A stream with a history; the values of each key in their order, as lines."""
    return [value.decode() for value in grow(client, stream)]


def test_lines_become_records_of_one_transaction(cli: Cli, stream: str) -> None:
    made = cli.json(
        "produce",
        stream,
        "--key-separator",
        ":",
        "--label",
        "first",
        "--header",
        "from=test",
        stdin=b"a:1\nb:2:x\na:\n",
    )
    assert (made["records"], made["stream"], made["label"]) == (3, stream, "first")
    read = cli.json_lines("consume", stream)
    assert sorted((item["key"], item["value"], item["local_sequence"]) for item in read) == [
        ("a", "", 2),
        ("a", "1", 0),
        ("b", "2:x", 1),
    ]
    assert {item["transaction"] for item in read} == {made["transaction"]}
    assert all(item["headers"] == [{"name": "from", "value": "test"}] for item in read)
    dlsns = sorted(rollbridge.DLSN.parse(item["dlsn"]) for item in read)
    assert [str(dlsns[0]), str(dlsns[-1])] == [made["first"], made["last"]]


def test_formats_and_limits(cli: Cli, stream: str) -> None:
    assert cli("produce", stream, "-", stdin=b"one").out.startswith("Committed 1 record in ")
    answer = cli("consume", stream, "--format", r"{key}\t{value}\t{offset}", "--null", "-")
    assert answer.out == "-\tone\t0\n"
    assert re.fullmatch(rf"1 record of {stream}; position {stream}@0-0:\d,0-1:\d\n", answer.err)
    assert cli("consume", stream, "--format", "").out == "\n"
    cli("produce", stream, "-", stdin=b"two\nthree\n")
    assert len(cli("consume", stream, "--max-records", "2").out.splitlines()) == 2


def test_consuming_goes_on_at_a_position_a_time_or_a_dlsn(cli: Cli, stream: str) -> None:
    cli("produce", stream, "-", stdin=b"one\ntwo\nthree\n")
    position = cli("consume", stream, "--max-records", "1").err.rstrip().rpartition(" ")[2]
    assert cli("consume", stream, "--from", position).out == "two\nthree\n"
    [second] = [item for item in cli.json_lines("consume", stream) if item["value"] == "two"]
    assert cli("consume", stream, "--from", second["dlsn"]).out == "two\nthree\n"
    assert cli("consume", stream, "--from", "2100-01-01").out == ""
    for wrong in ("soon", "other/stream@0-0:0", "0-0:99:0"):
        refused = cli("consume", stream, "--from", wrong)
        assert (refused.code, refused.out) == (ExitCode.REFUSED, "")


def test_records_of_open_transactions_are_previewed(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    txn = client.begin(stream)
    txn.write(stream, key=b"k", value=b"open")
    txn.flush()
    assert cli("consume", stream).out == ""
    answer = cli("consume", stream, "--isolation", "read_uncommitted", "--format", "{value} {committed} {transaction}")
    assert answer.out == f"open no {txn.id}\n"
    txn.abort()


def test_a_member_of_a_group_commits_nothing_that_it_could_not_print(
    cli: Cli, client: rollbridge.Bridge, stream: str, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    wanted = {f"value {number}" for number in range(3_000)}
    with client.transaction(stream) as transaction:
        for value in wanted:
            transaction.write(stream, key=value.encode(), value=value.encode())
    group, file = unique_name("group"), tmp_path / "printed"
    with (
        file.open("wb") as out,
        cli.start("consume", stream, "--group", group, "--follow", stdout=out, file_bytes=20_000) as member,
    ):
        assert member.wait(PATIENCE_S) != 0
    found = set(file.read_text().splitlines())
    assert not wanted <= found, "all of it fits into the file"
    config = {
        "bootstrap.servers": client.settings.bootstrap_servers,
        "zookeeper": client.settings.zookeeper,
        "zookeeper.root": client.settings.zookeeper_root,
        "group.id": group,
    }
    with rollbridge.Consumer({**config, "auto.offset.reset": "earliest"}) as rest:
        rest.subscribe([stream])

        def has_all() -> bool:
            found.update((message.value() or b"").decode() for message in rest.consume(500, 0.5))
            return wanted <= found

        eventually(has_all, "what was not printed is still to be read")


def test_a_member_of_a_group_goes_on_where_the_group_is(
    cli: Cli, client: rollbridge.Bridge, stream: str, unique_name: Callable[[str], str]
) -> None:
    group = unique_name("group")
    values = grown(client, stream)
    options = ("--group", group, "--format", "{key}={value}", "--max-records")
    read = cli("consume", stream, *options, str(len(KEYS) * len(values)))
    assert by_key(read.out) == {key.decode(): values for key in KEYS}
    assert read.err.endswith(f"of {stream}; by a member of group {group}\n")
    write(client, stream, b"later")
    assert by_key(cli("consume", stream, *options, str(len(KEYS))).out) == {key.decode(): ["later"] for key in KEYS}


def test_whole_transactions_are_printed(cli: Cli, client: rollbridge.Bridge, unique_name: Callable[[str], str]) -> None:
    scope = unique_name("scope")
    for name in ("orders", "payments"):
        client.admin.create_stream(f"{scope}/{name}", segments=2)
    with client.transaction(f"{scope}/orders", f"{scope}/payments", label="one") as txn:
        for number in range(4):
            txn.write(f"{scope}/{('orders', 'payments')[number % 2]}", key=b"%d" % number, value=b"v%d" % number)
    printed = cli("consume", scope, "--transactions").out.splitlines()
    assert printed[0].endswith(f'{txn.id} of tester "one", 4 records')
    assert printed[1:] == ["v0", "v1", "v2", "v3"]
    head, *records = cli.json_lines("consume", f"{scope}/default", "--transactions")
    assert (head["type"], head["records"]) == ("transaction", 4)
    assert head["streams"] == {f"{scope}/orders": 2, f"{scope}/payments": 2}
    assert [item["total_order"] for item in records] == [1, 2, 3, 4]
    assert {item["commit_position"] for item in records} == {head["order"]}
    assert cli("consume", scope, "--transactions", "--from", head["position"]).out == ""
    assert cli("consume", f"{scope}/nothing", "--transactions").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    "options",
    [
        ("--from-end",),
        ("--from", "latest", "--from-beginning"),
        ("--group", "g"),
        ("--group", "g", "--transactions"),
        ("--group", "g", "--follow", "--from", "0-0:1:0"),
        ("--transactions", "--isolation", "read_uncommitted"),
    ],
)
def test_options_that_do_not_go_together(cli: Cli, stream: str, options: tuple[str, ...]) -> None:
    assert cli("consume", stream, *options).code == ExitCode.USAGE


def test_an_empty_file_is_an_empty_transaction(cli: Cli, stream: str) -> None:
    made = cli.json("produce", stream, "-")
    assert (made["records"], made["first"], made["last"]) == (0, None, None)
    assert cli("consume", stream).out == ""


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_file_of_many_lines_arrives_whole_and_in_order_per_key(
    cli: Cli, stream: str, tmp_path: Path, compression: str
) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(f"{number % 7}={number}\n" for number in range(5000)))
    made = cli("produce", stream, str(file), "--key-separator", "=", "--compression", compression, "--progress")
    assert made.out.startswith("Committed 5,000 records")
    read = by_key(cli("consume", stream, "--format", "{key}={value}").out)
    assert read == {str(key): [str(number) for number in range(key, 5000, 7)] for key in range(7)}


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (b"a=1\nb=2\nno separator\n", "line 3 has no b'='"),
        (b"a=1\nb=" + b"x" * 1_000_001, "1,000,000|1000000"),
    ],
    ids=["no separator", "too large"],
)
def test_a_bad_line_leaves_nothing_behind(cli: Cli, stream: str, stdin: bytes, words: str) -> None:
    refused = cli("produce", stream, "-", "--key-separator", "=", stdin=stdin)
    assert refused.code == ExitCode.REFUSED
    assert refused.out == ""
    assert "nothing of it will be visible" in refused.err
    assert any(word in refused.err for word in words.split("|"))
    cli("produce", stream, "-", "--key-separator", "=", stdin=b"c=3\n")
    assert cli("consume", stream).out == "3\n"


def test_one_segment_and_what_a_transaction_has_written_to_it(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    values = {b"k%d" % number: b"v%d" % number for number in range(8)}
    write(client, stream, b"before")
    txn = client.begin(stream)
    for key, value in values.items():
        txn.write(stream, key=key, value=value)
    txn.flush()
    names: list[str] = []

    def named() -> bool:
        described = cli("txn", "describe", str(txn.id), "--json")
        names[:] = json.loads(described.out or "{}").get("segments", {}).get(stream, [])
        return bool(names)

    eventually(named, "the transaction is recorded")
    assert [name.partition("/#transaction.")[0] for name in names] == [
        f"{stream}/{item.id.number}/#epoch.{item.id.epoch}" for item in client.admin.history(stream).active.segments
    ]
    assert all(name in cli("txn", "describe", str(txn.id)).out for name in names)
    client.admin.scale(stream, seal=[0, 1], ranges=[(0.0, 1.0)])
    txn.commit()  # a rolling one
    printed = [cli("consume", name, "--segment").out.splitlines() for name in names]
    assert sorted(line for lines in printed for line in lines) == sorted(value.decode() for value in values.values())
    epochs = cli.json("stream", "history", stream)["epochs"]
    rolled = next(epoch for epoch in epochs if epoch["cause"] == "rolling-transactions")
    whole = [f"{stream}/{item['number']}/#epoch.{item['epoch']}" for item in rolled["segments"]]
    assert [cli("consume", name, "--segment").out.splitlines() for name in whole] == printed
    wrong = cli("consume", stream, "--segment")
    assert (wrong.code, "is not a qualified segment name" in wrong.err) == (ExitCode.REFUSED, True)


def test_an_open_native_transaction_is_waited_for_and_then_named(
    cli: Cli, cluster: AnyCluster, client: rollbridge.Bridge, stream: str
) -> None:
    write(client, stream, b"x")
    topic = client.admin.describe(stream).config.name.segment_topic(rollbridge.SegmentId.of(0, 0))
    producer = Producer({**producer_config(cluster.bootstrap_servers), "transactional.id": f"holds-{topic}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"undecided", on_delivery=lambda error, _: None)
    producer.flush(120)
    stalled = cli("consume", stream, "--wait", "1500ms")
    assert stalled.code == ExitCode.UNAVAILABLE
    assert "a native transaction is still open there" in stalled.err
    assert "segments 0.#epoch.0 at" in stalled.err
    producer.abort_transaction(30)
    read = cli("consume", stream)
    assert read.code == ExitCode.OK
    assert read.out.splitlines() == ["x"] * len(KEYS)


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def test_following_goes_on_over_new_epochs_until_it_is_interrupted(
    cli: Cli, client: rollbridge.Bridge, stream: str
) -> None:
    with cli.start("consume", stream, "--follow", "--format", "{key}={value}") as reader:
        write(client, stream, b"0")
        assert len(by_key("\n".join(read_lines(reader, len(KEYS))))) == len(KEYS)
        values = grown(client, stream)
        read = by_key("\n".join(read_lines(reader, len(KEYS) * len(values))))
        assert read == {key.decode(): values for key in KEYS}
        reader.send_signal(signal.SIGINT)
        assert reader.wait(PATIENCE_S) == ExitCode.INTERRUPTED
        assert reader.stderr is not None
        assert "interrupted" in reader.stderr.read()


def test_following_from_the_end_leaves_out_what_was_there(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    write(client, stream, b"old")
    with cli.start("consume", stream, "--from-end", "--follow", "--max-records", "1") as reader:
        number = 0
        while reader.poll() is None:
            write(client, stream, b"%d" % number)
            number += 1
        assert reader.stdout is not None
        assert reader.stdout.read().strip() in {str(count) for count in range(number)}
        assert reader.returncode == ExitCode.OK


def test_a_reader_that_was_left_ends_without_a_complaint(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    write(client, stream, b"x")
    with cli.start("consume", stream, "--follow") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "x\n"
        reader.stdout.close()
        while reader.poll() is None:
            write(client, stream, b"y")
        assert reader.returncode == ExitCode.OK
        assert reader.stderr is not None
        assert "Error" not in reader.stderr.read()


def test_records_that_nothing_takes_are_told_of(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    write(client, stream, b"x")
    with Path("/dev/full").open("wb") as full, cli.start("consume", stream, stdout=full) as reader:
        assert reader.wait(PATIENCE_S) == ExitCode.ENVIRONMENT
        assert reader.stderr is not None
        told = reader.stderr.read().splitlines()
        assert told[0].startswith(f"0 records of {stream}; position")
        assert "there is no room for the output" in told[1]


def test_following_a_stream_that_is_deleted_ends_and_says_so(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    write(client, stream, b"x")
    with cli.start("consume", stream, "--follow") as reader:
        assert read_lines(reader, len(KEYS)) == ["x"] * len(KEYS)
        client.admin.delete_stream(stream)
        assert reader.wait(PATIENCE_S) == ExitCode.NOT_FOUND
        assert reader.stderr is not None
        assert f"stream {stream} does not exist" in reader.stderr.read()


def test_what_tail_prints_is_what_cas_expects(site: Site, cli: Cli, ledger: str) -> None:
    assert cli("tail", ledger).out == "empty\n"
    first = cli("cas", ledger, "one", "--key", "a", "--expected", "empty", "--transaction-id", "7")
    assert first.code == 0, first
    assert cli("tail", ledger).out == first.out
    fallen = cli("cas", ledger, "no", "--key", "a", "--expected", "any", "--transaction-id", "6", "--monotonic-ids")
    assert fallen.code == ExitCode.REFUSED
    second = cli.json("cas", ledger, "two", "--key", "a", "--expected", first.out.strip(), "--header", "h=v")
    assert cli.json("tail", ledger, "--key", "a", "--scope", "key") == second
    assert [message.value() for message in site.committed(ledger)] == [b"one", b"two"]


def test_a_refused_write_has_an_exit_code_and_says_what_is_there(cli: Cli, ledger: str) -> None:
    first = cli("cas", ledger, "one", "--expected", "empty")
    refused = cli("cas", ledger, "no", "--expected", "empty")
    assert refused.code == ExitCode.CONFLICT
    assert first.out.strip() in refused.err
    error = json.loads(cli("cas", ledger, "no", "--expected", "empty", "--json").err)["error"]
    assert (error["code"], error["status_code"]) == ("cas-write", 525)
    assert (error["expected"], error["actual"]) == ("empty", first.out.strip())


def test_a_token_can_be_asked_with(cli: Cli, client: rollbridge.Bridge, ledger: str) -> None:
    with client.cas_writer(ledger) as writer:
        token = writer.token(b"a", expected=rollbridge.EMPTY)
        assert cli.json("cas", ledger, "--outcome", str(token)) == {"written": False}
        sn = writer.write(b"a", b"1", expected=rollbridge.EMPTY, token=token)
    assert cli("cas", ledger, "--outcome", str(token)).out == f"{sn}\n"
    assert cli("cas", ledger, "--outcome", "nonsense").code == ExitCode.REFUSED


def test_neither_tail_nor_cas_of_a_stream_that_does_not_exist(cli: Cli, ledger: str) -> None:
    assert cli("tail", f"{ledger}-no").code == ExitCode.NOT_FOUND
    assert cli("cas", f"{ledger}-no", "v", "--expected", "any").code == ExitCode.NOT_FOUND
