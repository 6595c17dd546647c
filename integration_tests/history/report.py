"""What a run, or several, did and found: for people, and for docs/soak.md."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration_tests.history.events import Fault


@dataclass
class Report:
    """What a run was, and what it found."""

    seed: int
    servers: str
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, float] = field(default_factory=dict)
    """Longest time from the end of a fault to the next commit of a new client."""
    answers: Counter[str] = field(default_factory=Counter)
    records: int = 0
    epochs: int = 0
    found: list[Fault] = field(default_factory=list)

    def demand(self) -> None:
        """AssertionError with the report, if something was found, or if too little was done to find anything."""
        text = "\n".join(self.lines())
        assert not self.found, text
        assert self.answers["transaction commit: ok"] > 100, text
        assert self.answers["plain commit: ok"] > 50, text
        assert self.answers["conditional commit: ok"] > 10, text
        assert self.answers["update commit: ok"] > 10, text
        assert self.answers["native commit: ok"] > 50, text
        assert self.answers["native abort: ok"] > 0, text
        assert self.epochs > 2 or not self.faults["scale"], text

    def demand_of_gateways(self) -> None:
        """The same of a run whose producers write through gateways."""
        text = "\n".join(self.lines())
        assert not self.found, text
        assert self.answers["gateway commit: ok"] > 100, text
        assert self.answers["gateway abort: ok"] > 10, text
        assert self.answers["transaction commit: ok"] > 100, text

    def add(self, other: Report) -> None:
        """Take in another run; the seed stays that of the first."""
        self.seconds += other.seconds
        self.faults.update(other.faults)
        for fault, took_s in other.recovery_s.items():
            self.recovery_s[fault] = max(took_s, self.recovery_s.get(fault, 0.0))
        self.answers.update(other.answers)
        self.records += other.records
        self.epochs += other.epochs
        self.found.extend(other.found)

    def lines(self) -> Iterator[str]:
        """For people; Markdown."""
        yield (
            f"Seed {self.seed}, brokers + ZooKeeper servers + coordinators: {self.servers}. "
            f"{self.seconds / 60:.1f} minutes, {self.records:,} committed records, "
            f"{self.epochs} epochs, {len(self.found)} findings."
        )
        yield ""
        yield from self.tables()

    def tables(self) -> Iterator[str]:
        """What was done and what was found; Markdown."""
        yield "| what clients did | answer | times |"
        yield "|---|---|---|"
        for name, count in sorted(self.answers.items()):
            kind, _, answer = name.partition(" ")
            yield f"| {kind} | {answer} | {count:,} |"
        yield ""
        yield "| fault | times | longest until a new client committed |"
        yield "|---|---|---|"
        for name, count in sorted(self.faults.items()):
            yield f"| {name} | {count} | {self.recovery_s.get(name, 0.0):.1f} s |"
        if self.found:
            yield ""
            for kind, count in Counter(fault.kind for fault in self.found).most_common():
                yield f"- {kind}: {count}"
                yield from (f"  - {fault.text}" for fault in [item for item in self.found if item.kind == kind][:7])


def summary(reports: Sequence[Report], command: str) -> Iterator[str]:
    """All runs of a soak as one section of docs/soak.md."""
    whole = Report(reports[0].seed, reports[0].servers)
    for report in reports:
        whole.add(report)
    day = datetime.datetime.now(datetime.UTC).date()
    yield f"`{command}` ran on {day}: {len(reports)} histories, one after the other, each on servers of its own"
    yield f"(brokers + ZooKeeper servers + coordinators: {whole.servers}), with {whole.seconds / 60:.1f} minutes of"
    yield f"clients and faults in all. **Findings: {len(whole.found)}.** {whole.records:,} records were committed over"
    yield f"{whole.epochs:,} epochs. Seeds {reports[0].seed} to {reports[-1].seed}; `--seed N` in `ARGS` begins again"
    yield "with one of them."
    yield ""
    yield from whole.tables()


def put_section(document: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` in a document.

    Raises:
        ValueError: there is no such section.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    fresh = "\n".join([begin, "", *lines, "", end])
    text, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: fresh, document.read_text(), flags=re.S)
    if count != 1:
        raise ValueError(f"{document} has {count} sections between {begin} and {end}, one is needed")
    document.write_text(text)
