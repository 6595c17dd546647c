"""Alerts on transactions, streams, and what is refused."""

from __future__ import annotations

from typing import Final

from rollbridge.monitoring.alerts import Alert, Remedy, Urgency

TOPICS_MANY: Final = 1_000
"""Topics of segments of one stream: a broker takes a few thousand partitions, and each of these has its replicas."""
EPOCHS_MANY: Final = 2_000
"""Epochs of one stream: clients read all of them when they begin."""

_OLDEST: Final = (
    "{{ range printf \"rollbridge_oldest_transaction_info{job='%s',group='%s'}\" $labels.job $labels.group | query }}"
    "It is {{ .Labels.transaction }} of client {{ .Labels.client }}"
    "{{ with .Labels.label }}, labelled {{ . }}{{ end }}. {{ end }}"
)
"""Names the oldest open transaction. Its name is no label of the alert: the next oldest one would begin it anew."""

TRANSACTION_ALERTS: Final = (
    Alert(
        name="OldTransaction",
        expression="max by (job, group) (rollbridge_oldest_transaction_age_seconds) > 12 * 3600",
        pending="10m",
        urgency=Urgency.WARNING,
        summary="A transaction of group {{ $labels.group }} has been open for {{ $value | humanizeDuration }}",
        description=_OLDEST + "While it is open, nothing that came after its begin can be truncated from the buffers "
        "that "
        "it writes to, and a takeover without a standby reads that.",
        means="A transaction is older than most jobs are. It is no fault of itself, but buffers grow behind it, and "
        "if its client is dead it holds them until its lease ends.",
        look=(
            "`rollbridge txn list`: its client, its label, its size, and what is left of its lease",
            "`rollbridge txn describe ID`: when its client was last heard of",
            "`rollbridge_stream_buffer_held_bytes`: what it costs by now",
        ),
        actions=(
            "Its client works: leave it, and extend the lease if it needs that: `rollbridge txn extend ID 2d`.",
            "Its client is dead and does not come back: `rollbridge txn abort ID`.",
        ),
        remedies=(
            Remedy(
                "old-transaction",
                "ask whose client {client} is: if it is dead and does not come back, rollbridge txn abort {id}; if it "
                "is at work, leave it",
            ),
            Remedy("long-replay", "rollbridge txn list --group {group}: commit or abort the oldest"),
        ),
        avoid="abort it without asking its owner: all that it wrote is lost, and the job begins anew.",
        threshold="Half of the lease that a transaction gets by default, so there is time for a decision. Where jobs "
        "are meant to run for days, raise it.",
    ),
    Alert(
        name="LeaseEnds",
        expression="min by (job, group) (rollbridge_least_lease_left_seconds) < 1800\n"
        "  and on (job, group) max by (job, group) (rollbridge_oldest_transaction_age_seconds) > 6 * 3600",
        pending="10m",
        urgency=Urgency.WARNING,
        summary="A lease of group {{ $labels.group }} ends in {{ $value | humanizeDuration }}",
        description=_OLDEST + "If the lease that ends is that of a long job, all that it wrote is aborted with it.",
        means="A lease ends within half an hour in a group that has a transaction of more than six hours: a job that "
        "takes longer than it was given, or one whose client has died. At the end of the lease it is aborted.",
        look=(
            "`rollbridge txn list`: whose lease it is. It may be a short one beside a long one, which is nothing",
            "whether its job is at work",
        ),
        actions=(
            "The job needs more time: `rollbridge txn extend ID 2d`. The job is dead: leave it, it ends by itself.",
        ),
        remedies=(
            Remedy(
                "gateway-lease",
                "if its producer is at work: rollbridge txn extend {id} 2d. If it was a job that has died and comes "
                "back, likewise; if it does not, and all that it wrote is to count: rollbridge txn commit {id}. Else "
                "leave it",
            ),
        ),
        avoid="extend the lease of a transaction whose client is dead: it holds the buffers for that much longer.",
        threshold="Half an hour is enough to extend a lease by hand. Metrics do not tell whose lease it is; groups "
        "with transactions of less than six hours only are left out, as begin anew costs them little. Where "
        "transactions with leases of minutes run beside long jobs all the time, take this rule out, or give the jobs "
        "a group of their own.",
    ),
    Alert(
        name="LeaseOverdue",
        expression="min by (job, group) (rollbridge_least_lease_left_seconds) < -60",
        pending="2m",
        urgency=Urgency.CRITICAL,
        summary="Leader of group {{ $labels.group }} does not end what has expired",
        description="A lease of group {{ $labels.group }} ({{ $labels.job }}) has ended {{ $value | humanizeDuration "
        "}} ago, and its transaction is still open: the leader does not get to it.",
        means="The leader lives and does not do what is due. Most likely it commits nothing either.",
        look=(
            "the leader's log: what it does, or what it waits for",
            "RollbridgeFoldLag and RollbridgeSlowCommits of the group",
            "the brokers: partitions without a leader, or without enough replicas in sync",
        ),
        actions=("Mend what it waits for. If it waits for nothing, restart it: the next leader goes on where it was.",),
        remedies=(Remedy("overdue", "the leader does not come to end them: look into its log"),),
        avoid="abort the transactions by hand: the same leader would have to do it.",
        threshold="Expired transactions are ended within a second; the doctor calls a minute a problem, too.",
    ),
    Alert(
        name="BufferHeld",
        expression="max by (job, group, stream) (rollbridge_stream_buffer_held_bytes) > 10 * 2 ^ 30",
        pending="30m",
        urgency=Urgency.WARNING,
        summary="Open transactions hold {{ $value | humanize1024 }}B of the buffer of {{ $labels.stream }}",
        description="Of the buffer of stream {{ $labels.stream }} ({{ $labels.job }}) {{ $value | humanize1024 }}B "
        "cannot "
        "be truncated. " + _OLDEST,
        means="The buffer grows on the disks of the brokers until the transaction that holds it ends.",
        look=(
            "`rollbridge txn list`: the oldest one that writes to the stream; its own size may be all of it",
            "free space of the brokers that have the buffer, and how fast `rollbridge_stream_buffer_disk_bytes` rises",
        ),
        actions=(
            (
                "As for RollbridgeOldTransaction: let it end, or abort it. Space is free some seconds after, a whole "
                "file of Kafka's at a time."
            ),
        ),
        avoid="set a retention on a buffer's topic: Kafka would delete what open transactions have written, and they "
        "could not be committed any more.",
        threshold="10 GiB in one stream are more than most disks notice and less than they have. Set it by yours.",
    ),
    Alert(
        name="CommitLogGrows",
        expression="max by (job, group) (rollbridge_commit_log_disk_bytes) > 10 * 2 ^ 30\n"
        "  and max by (job, group) (rollbridge_commit_log_disk_bytes)\n"
        "    > 1.2 * max by (job, group) (rollbridge_commit_log_disk_bytes offset 1d)",
        pending="1h",
        urgency=Urgency.WARNING,
        summary="Commit log of group {{ $labels.group }} has grown to {{ $value | humanize1024 }}B",
        description="The commit log of group {{ $labels.group }} ({{ $labels.job }}) is larger than 10 GiB, and by a "
        "fifth larger than a day ago.",
        means="Outcomes of more transactions are kept than before: there are more of them, their manifests are "
        "larger, or nothing is truncated.",
        look=(
            "`rollbridge group list`: how long the log is kept",
            "`rollbridge_commit_log_truncations_total` and `rollbridge_chores_refused_total`: whether truncation works",
            "`rollbridge_clocks_differ`: nothing is deleted for its age meanwhile",
        ),
        actions=("`rollbridge group update` with a shorter retention, if nobody reads outcomes of that age.",),
        avoid="set a retention on its topic: leaders must be able to read what their snapshots name.",
        threshold="With a steady load it grows for a week (its retention by default) and then no more. A fifth in a "
        "day is more than that.",
    ),
    Alert(
        name="FoldLag",
        expression="max by (job, group, stream) (rollbridge_stream_fold_lag_seconds) > 30",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Leader lags {{ $value | humanizeDuration }} behind stream {{ $labels.stream }}",
        description="The leader of group {{ $labels.group }} ({{ $labels.job }}) has not read messages of the buffer "
        "of {{ $labels.stream }} for {{ $value | humanizeDuration }}. Commits of its group wait for as long.",
        means="The leader does not keep up with what writers write, or a broker does not give it to it. Each commit "
        "waits until the leader has read up to it.",
        look=(
            "whether one stream lags or all: one is a broker or a partition, all are the leader",
            "processor of the leader's process: it has one thread for a group",
            "`rollbridge doctor`: `quota` says that Kafka holds it back, with a quota that somebody has set",
            "`rollbridge_effect_duration_seconds`: what its time goes into",
            "RollbridgeSlowCommits: a merge that takes long holds it up",
        ),
        actions=(
            (
                "The leader is busy: create further streams in a group of their own (`--group`), which another "
                "coordinator may lead; let writers send larger batches."
            ),
            "A broker is slow, or a partition has no leader: bring it back.",
        ),
        remedies=(
            Remedy(
                "quota",
                "kafka-configs.sh --bootstrap-server {servers} --alter {entity} --delete-config {settings}",
            ),
        ),
        avoid="restart the leader: the next one has the same to read, and has to take over first.",
        threshold="The leader reads within milliseconds. Half a minute for five minutes is no burst.",
    ),
    Alert(
        name="SlowCommits",
        expression="histogram_quantile(0.99, sum by (job, group, path, le) "
        '(rate(rollbridge_commit_latency_seconds_bucket{path=~"direct|conditional"}[10m]))) > 2',
        pending="15m",
        urgency=Urgency.WARNING,
        summary="Commits of group {{ $labels.group }} take {{ $value | humanizeDuration }} (p99, {{ $labels.path }})",
        description="One in a hundred commits of group {{ $labels.group }} ({{ $labels.job }}) that go straight into "
        "active segments takes {{ $value | humanizeDuration }} or longer.",
        means="Ordinary commits are slow. Rolling commits and large transactions have latencies of their own, and "
        "are not counted here.",
        look=(
            "`rollbridge_merge_duration_seconds`: if it is as long, the brokers are slow; if not, commits wait in line",
            "`rollbridge_round_bytes` and `rollbridge_seal_duration_seconds`: what they wait behind",
            "RollbridgeFoldLag: what the leader has not read cannot commit",
            "under-replicated partitions: `rollbridge doctor` says `under-replicated` and `below-min-isr`",
        ),
        actions=(
            "Slow brokers: disks and network; `acks=all` waits for the slowest replica in sync.",
            (
                "They wait behind large transactions: lower `MERGE_BESIDE_BYTES`, so that those are merged beside "
                "the line."
            ),
        ),
        avoid="lower `min.insync.replicas` or the replication factor for it.",
        threshold="Ordinary commits take some milliseconds to tens of them. Over 15 minutes one slow commit of few "
        "does not call anybody.",
    ),
    Alert(
        name="ChangeWaits",
        expression="max by (job, group) (rollbridge_longest_wait_seconds) > 300",
        pending="1m",
        urgency=Urgency.WARNING,
        summary="A scale or rolling commit of group {{ $labels.group }} waits",
        description="It has waited for {{ $value | humanizeDuration }} ({{ $labels.job }}): for native transactions "
        "of others, or for a partition that has no leader. Commits to its stream wait with it.",
        means="Segments cannot be closed while somebody else's native transaction is open on them.",
        look=(
            "the leader's log: `waits for native transactions of others` names them",
            "`rollbridge doctor`: `hanging-transaction` and `long-transaction`",
        ),
        actions=("End their producer, or wait for the time-out of their transaction, or let the scale abort them.",),
        remedies=(
            Remedy(
                "stuck",
                "sealing waits for native transactions of others: see hanging-transaction, or the leader's log",
            ),
            Remedy(
                "hanging-transaction",
                "kafka-transactions.sh abort --partition {partition} --topic {topic} --start-offset {offset}",
            ),
            Remedy("long-transaction", "it ends by itself after its time-out, or end its producer"),
            Remedy(
                "stream-error",
                "end these (kafka-transactions.sh), or rollbridge stream scale --abort-foreign; or wait",
                case="which waits for native transactions of others",
            ),
        ),
        avoid="abort a native transaction of a producer that works, unless its owner knows: it loses what it wrote.",
        threshold="Native transactions that work end within a minute; brokers end them after 15 at most. A third of "
        "that leaves time to look.",
    ),
    Alert(
        name="TransactionsRefused",
        expression="sum by (job, group, reason) "
        '(increase(rollbridge_transactions_aborted_total{reason=~"limit|refused|other"}[15m])) > 0',
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Transactions of group {{ $labels.group }} were aborted: {{ $labels.reason }}",
        description="{{ $value | humanize }} transactions of group {{ $labels.group }} ({{ $labels.job }}) ended as "
        "aborted within 15 minutes although their clients wanted them committed.",
        means="`limit`: a transaction exceeds a limit, or there is no room for it. `refused`: Kafka refused its "
        "records or its commit. `other`: its frames were broken, or of a newer version. Nothing of it was written; "
        "its client has an error that says so.",
        look=(
            "the leader's log: a line for each, with Kafka's reason",
            "`rollbridge txn outcome ID`, or the error of the client",
            "`rollbridge_transactions_held_bytes` and `rollbridge_open_transactions` for `limit`",
        ),
        actions=(
            (
                "`limit`: end what is open for long; see the [limits](guarantees.md#limits) and raise the one that "
                "is named."
            ),
            "`refused`: grant the right, or put the topic right, that Kafka names.",
            (
                "`other`: a client that is not ours, or a release that is newer than the coordinators: upgrade these "
                "first."
            ),
        ),
        avoid="let clients begin such transactions again without end: a limit that is reached stays reached.",
        threshold="None of these happens in good order, so one is worth a look. What clients, operators, conditions "
        "and offsets abort is not counted.",
    ),
    Alert(
        name="TransactionsExpire",
        expression='sum by (job, group) (increase(rollbridge_transactions_aborted_total{reason="expired"}[1h])) > 3',
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Transactions of group {{ $labels.group }} outlive their leases",
        description="{{ $value | humanize }} transactions of group {{ $labels.group }} ({{ $labels.job }}) were "
        "aborted within an hour because their leases had ended.",
        means="Clients die and do not come back for what they had open, or jobs take longer than the lease that they "
        "ask for. What they wrote is aborted.",
        look=(
            "the leader's log: `expire` with id and client of each",
            "whether these clients live, and what `timeout` they give `begin`",
        ),
        actions=(
            "Ask for a longer lease, or extend it as the job goes on: `txn.extend`.",
            "Give clients a name, so that they find again after a restart what they had open.",
        ),
        avoid="ask for leases of days everywhere: the dead hold the buffers for as long.",
        threshold="One process that dies leaves a few behind. More in an hour is a habit.",
    ),
    Alert(
        name="StreamInError",
        expression="max by (job, group, stream, code) (rollbridge_stream_error) == 1",
        pending="2m",
        urgency=Urgency.CRITICAL,
        summary="Stream {{ $labels.stream }} is in an error state: {{ $labels.code }}",
        description="Transactions of stream {{ $labels.stream }} ({{ $labels.job }}) wait: {{ $labels.code }}. Other "
        "streams of its group go on.",
        means="Kafka refuses one of the stream's topics, or its owner has changed an adopted one. Transactions that "
        "write to it wait, and commit when it is put right. With `buffer-lost`, `buffer-unreadable`, "
        "`metadata-unreadable` or `newer-format` the stream is not led at all: its buffer, or a ZooKeeper node, is "
        "gone or cannot be read. What was open in a lost buffer ends as aborted; what was committed is there.",
        look=(
            "`rollbridge stream describe STREAM`: since when, which topic, and what Kafka says",
            "who has changed rights or settings at that time",
        ),
        actions=(
            "The leader tries again within a minute, and says `has left its error state`.",
            "What cannot wait: `rollbridge txn abort ID`.",
        ),
        remedies=(
            Remedy("stream-error", "put {what} right"),
            Remedy(
                "unled",
                "put right what the text names: the leader looks every 5 s; or copy what is needed from the stream and "
                "delete it (rollbridge stream delete; release if it has adopted a topic), which works in this state",
            ),
            Remedy(
                "retention",
                "kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic} "
                "--add-config {settings}",
            ),
        ),
        avoid="delete the topic or create it anew: its records would be gone, and the stream with them.",
        threshold="Faults that pass by themselves, such as leaders of partitions that move, are no error state.",
    ),
    Alert(
        name="RequestsRefused",
        expression="sum by (job, group, kind) (increase(rollbridge_admin_requests_total"
        '{result="refused", kind!~"describe-transaction|look-up-transactions"}[15m])) > 5',
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Admin requests of group {{ $labels.group }} are refused: {{ $labels.kind }}",
        description="{{ $value | humanize }} requests of kind {{ $labels.kind }} to group {{ $labels.group }} ({{ "
        "$labels.job }}) were refused within 15 minutes.",
        means="Somebody asks for what cannot be done, again and again: most often a program that does not look at "
        "the answer, or a right that the coordinator lacks.",
        look=(
            "the leader's log: each refusal with its reason; the client has the same",
            (
                "the kind: `scale-stream` waits for native transactions of others, `create-stream` needs rights and "
                "brokers"
            ),
        ),
        actions=(
            (
                "Mend the reason, and ask again. [Admin requests](#admin-requests-that-are-refused-or-take-long) says "
                "more."
            ),
        ),
        avoid="let a program repeat a request that was refused without a pause.",
        threshold="A person who tries something gets a few refusals; more than five of a kind in a quarter of an "
        "hour is a program. Questions about transactions that the leader does not know are not counted.",
    ),
    Alert(
        name="ChoresRefused",
        expression="sum by (job, group) (increase(rollbridge_chores_refused_total[5m])) > 0",
        pending="10m",
        urgency=Urgency.WARNING,
        summary="Housekeeping of group {{ $labels.group }} is refused",
        description="Kafka or ZooKeeper refuses the leader of group {{ $labels.group }} ({{ $labels.job }}) what no "
        "transaction waits for, and it has tried again for ten minutes.",
        means="Snapshots, truncation or bookkeeping do not get done. Commits go on; buffers, logs or takeovers grow.",
        look=(
            "the leader's log: `housekeeping (...) is refused, everything else goes on`",
            "`rollbridge doctor` with the coordinator's credentials: it lists rights that are missing",
        ),
        actions=("Put right what the line names: a right, a ZooKeeper quota, a topic of snapshots that was changed.",),
        remedies=(Remedy("snapshot-lag", "look into the log of the leader of {group}: only it writes snapshots"),),
        avoid="leave it because all works: the next takeover reads what no snapshot has.",
        threshold="It is tried again at least once a minute, so ten minutes are ten refusals.",
    ),
    Alert(
        name="LateRecordsRefused",
        expression="sum by (job, group) (increase(rollbridge_late_records_refused_total[1h])) > 0",
        pending="1m",
        urgency=Urgency.CRITICAL,
        summary="Records behind a sealed segment of group {{ $labels.group }} are read by nobody",
        description="{{ $value | humanize }} records of group {{ $labels.group }} ({{ $labels.job }}) were "
        "acknowledged behind the end of a sealed segment, and Kafka refused to take them into what continues it.",
        means="Acknowledged records stand where no reader of the stream comes. They are there, and can be written "
        "again.",
        look=("`rollbridge doctor`: which records, and why they were refused",),
        remedies=(
            Remedy(
                "late-records-refused",
                "read them from topic {place}, below offset {offset}, and write them again",
            ),
        ),
        avoid="truncate the stream before they are written again: they would be gone.",
        threshold="Each such record matters, so one is enough.",
    ),
    Alert(
        name="FramesDropped",
        expression="sum by (job, group, reason) "
        '(increase(rollbridge_frames_dropped_total{reason=~"corrupt|crowded|foreign|newer"}[15m])) > 0',
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Frames in buffers of group {{ $labels.group }} are dropped: {{ $labels.reason }}",
        description="{{ $value | humanize }} messages in buffers of group {{ $labels.group }} ({{ $labels.job }}) "
        "were dropped within 15 minutes: {{ $labels.reason }}.",
        means="`corrupt`: a client writes what is no frame. `foreign`: somebody who is no client writes to a buffer. "
        "`newer`: a client is of a newer release than the coordinators. `crowded`: there are too many open "
        "transactions. What was dropped changes nothing; the transaction it was of, if any, does not commit without "
        "it.",
        look=(
            "`foreign`: the live page of the leader, its log and `rollbridge doctor` show the last such message",
            "the leader's log: once for each transaction and cause, with the client",
            "the [reasons](protocol-states.md); `late`, `zombie`, `fenced`, `duplicate` and `repeated` are ordinary",
        ),
        actions=(
            "`newer`: upgrade the coordinators; [they come first](#rolling-upgrades).",
            "`crowded`: end what is open, or raise `OPEN_TRANSACTIONS_MAX`.",
        ),
        remedies=(
            Remedy(
                "foreign-messages",
                "stop the program that writes this, or take its right to Write on topic {topic} away",
            ),
        ),
        avoid="delete messages from a buffer.",
        threshold="Good clients cause none of the four. After a takeover those that are read again count once more.",
    ),
    Alert(
        name="StreamGrows",
        expression=f"max by (job, group, stream) (rollbridge_stream_topics) >= {TOPICS_MANY}\n"
        f"  or max by (job, group, stream) (rollbridge_stream_epochs) >= {EPOCHS_MANY}",
        pending="1h",
        urgency=Urgency.WARNING,
        summary="Stream {{ $labels.stream }} has {{ $value }} topics or epochs",
        description="Stream {{ $labels.stream }} ({{ $labels.job }}) has been scaled, or has taken late commits, "
        "many times. Brokers carry its topics, and clients read its epochs when they begin.",
        means="Each scale and each rolling commit makes epochs and topics, which go with their records only.",
        look=(
            "`rollbridge stream history STREAM`: what has made them",
            "`rollbridge_rolling_commits_total`: two epochs each",
        ),
        actions=("Commit what is open before a scale.",),
        remedies=(
            Remedy(
                "growth",
                "topics go with their records: set a retention (rollbridge stream update {stream} --retention-time "
                "7d), or rollbridge stream truncate {stream}",
                case="of topics",
            ),
            Remedy(
                "growth",
                "epochs are dropped by themselves once all that they hold is truncated: see rollbridge stream "
                "history {stream}",
                case="of epochs",
            ),
        ),
        avoid="delete topics of segments by hand: their records are part of the stream.",
        threshold=f"{TOPICS_MANY:,} topics and {EPOCHS_MANY:,} epochs are where the doctor begins to warn.",
    ),
)
