"""Refusals: which errors of the adapters say for certain that an effect was not carried out, and will not be."""

from __future__ import annotations

from typing import Final

from rollbridge.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    KafkaUnavailable,
    NotFoundError,
    RollbridgeError,
)
from rollbridge.kafka.errors import (
    AppendRefusedError,
    AppendUnknownError,
    AuthenticationError,
    InvalidStateError,
    SealTimeoutError,
    UnsupportedBrokerError,
)
from rollbridge.model.names import is_segment_topic
from rollbridge.zookeeper.errors import ZooKeeperRefused
from rollbridge_coordinator.shell.frame_feed import FrameFeed
from rollbridge_coordinator.state import effects as fx
from rollbridge_coordinator.state.faults import LEADERLESS, SEAL_TIMEOUT

_LOOKS: Final = (fx.Look, fx.ReadLate, fx.FindLate, fx.EndOffsets)
"""What changes nothing."""
_DEFINITE: Final = (AppendRefusedError, InvalidRequestError, NotFoundError, ConflictError)
_DOUBTFUL: Final = (
    FencedError,
    InvalidStateError,  # a defect of ours
    AuthenticationError,  # the connection is refused, and not what was asked for
    UnsupportedBrokerError,
)
"""Those of the definite ones that say nothing about the effect. All others leave a doubt: time-outs, lost
connections, ``AppendUnknownError``, and of ZooKeeper's all but a write that it does not take."""


def refusal(effect: fx.Effect, fault: Exception, feed: FrameFeed | None) -> fx.Refused | None:
    """What to throw into a procedure for an error of its effect; None if that leaves a doubt.

    Args:
        effect: What was tried.
        fault: What an adapter raised.
        feed: The frames of the effect, if it has any.
    """
    if isinstance(fault, CorruptDataError) and isinstance(effect, fx.MergeFrames | fx.AppendTogether) and feed:
        # A frame that is no batch, or is gone from the buffer: found while the batches were made, nothing was sent.
        topic = effect.items[feed.at[0]][0] if feed.at else None
        return fx.Refused(effect, str(fault), code=fault.code, topic=topic, places=feed.at)
    if isinstance(fault, ZooKeeperRefused) and isinstance(effect, fx.ON_ZOOKEEPER):
        return fx.Refused(effect, str(fault), code=fault.code)
    if isinstance(fault, AppendUnknownError) and fault.batch is not None and feed is not None:
        # A round that was not to be committed yet leaves no doubt once it has been aborted.
        places = feed.items_of(fault.batch)
        return fx.Refused(effect, str(fault), code=fx.STUMBLED, topic=fault.topic, places=places) if places else None
    if isinstance(fault, AppendUnknownError) and fault.topic is not None and is_segment_topic(fault.topic):
        # Neither does one with a segment that no broker leads now.
        return fx.Refused(effect, str(fault), code=fault.kafka_error, topic=fault.topic)
    if isinstance(fault, KafkaUnavailable) and isinstance(effect, _LOOKS) and is_segment_topic(_topic_of(fault) or ""):
        return fx.Refused(effect, str(fault), code=LEADERLESS, topic=_topic_of(fault))
    if isinstance(effect, fx.Look | fx.ReadLate | fx.FindLate) and isinstance(fault, CorruptDataError):
        # Whoever may write to a segment can write there what nobody can read: only who expects something of it suffers,
        # or what came in late there.
        return fx.Refused(effect, str(fault), code=fault.code, topic=_topic_of(fault))
    if isinstance(fault, SealTimeoutError) and isinstance(effect, fx.Seal):
        # Whatever of it was done: sealing again goes on from there.
        return fx.Refused(effect, str(fault), code=SEAL_TIMEOUT, topic=_topic_of(fault))
    if isinstance(fault, _DOUBTFUL) or not isinstance(fault, _DEFINITE):
        return None
    if isinstance(fault, AppendRefusedError):
        places = feed.items_of(fault.batch) if feed is not None and fault.batch is not None else ()
        return fx.Refused(effect, str(fault), code=fault.kafka_error, topic=fault.topic, places=places)
    return fx.Refused(effect, str(fault), code=fault.code, topic=_topic_of(fault))


def _topic_of(fault: RollbridgeError) -> str | None:
    kind, _, name = fault.resource.partition(" ")
    return name if kind == "topic" else None
