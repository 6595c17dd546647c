"""Metadata cache of a client: the streams in use, without a ZooKeeper read per transaction.

A stream is read on first use and again after its watch has fired: an epoch was added, the stream was deleted, or the
connection was lost and something may have been missed. Until then the old view serves. That is harmless: a transaction
that begins against the epoch before is committed by rolling.

Watches fire on kazoo's threads, which only mark a stream as stale; :meth:`Catalog.refresh` reads it on the
housekeeping thread. The lock guards the table of views and is never held across a read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rollbridge.errors import RollbridgeError, StreamNotFoundError, UnavailableError
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamState
from rollbridge.stream.names import Partition, StreamName
from rollbridge.stream.routing import Route, StreamView, place_of_partition

logger = logging.getLogger(__name__)


class Catalog:
    """Cached views of streams. Safe to use from several threads.

    Attributes:
        generation: Grows whenever a view changes, so that whatever is derived from views knows when to look again.
    """

    def __init__(self, metadata: Metadata, poke: Callable[[], None]) -> None:
        """Start empty; ``poke`` is called when :meth:`refresh` has something to do."""
        self.generation = 0
        self._metadata = metadata
        self._poke = poke
        self._views: dict[str, StreamView] = {}
        self._adopted: dict[str, str] = {}
        self._plain: set[str] = set()
        self._stale: set[str] = set()
        self._lock = threading.Lock()

    def view(self, stream: str) -> StreamView:
        """Return the cached view of a stream, or of the one that has adopted a topic; read it if there is none.

        Raises:
            InvalidNameError, StreamNotFoundError, ZooKeeperUnavailableError.
        """
        view = self._views.get(stream)
        return self._read(self.name_of(stream)) if view is None else view

    def read(self, stream: str) -> StreamView:
        """Read a stream as it is now. Raises as :meth:`view` does."""
        return self._read(self.name_of(stream))

    def name_of(self, name: str, changed: Callable[[], None] | None = None) -> str:
        """Return ``scope/stream`` for that, or for a topic that a stream has adopted.

        ``changed`` is called once when a topic is adopted that was not.

        Raises:
            InvalidNameError, StreamNotFoundError, ZooKeeperUnavailableError.
        """
        if "/" in name:
            return name
        known = self._adopted.get(name)
        view = None if known is None else self._views.get(known)
        if view is not None and view.config.topic == name:
            return str(view.config.name)
        found = self._adopted[name] = str(self._metadata.name_of(name, changed))
        return found

    def find(self, name: str) -> str | None:
        """Return what :meth:`name_of` does; None for a plain topic, which is remembered until a stream adopts it."""
        if name in self._plain:
            return None
        self._plain.add(name)  # before the answer, so that a change that follows it is not lost
        try:
            found = self.name_of(name, lambda: self._plain.discard(name))
        except StreamNotFoundError:
            return None
        except BaseException:
            self._plain.discard(name)
            raise
        self._plain.discard(name)
        return found

    def suspect(self, stream: str) -> None:
        """Have a stream read again soon: something was met that the view does not explain."""
        self._changed(self._adopted.get(stream, stream))

    def route(self, stream: str, epoch: int) -> Route:
        """Return the route through one epoch of a stream, or through the one that has grown from it.

        Raises:
            InvalidRequestError: the epoch is not in its history.
        """
        view = self.view(stream)
        if view.route.epoch == epoch:
            return view.route
        if epoch >= view.history.next_epoch:
            view = self.read(stream)
        return Route.of(view.config, view.history.grown_from(epoch))

    def grown(self, route: Route) -> Route:
        """Return the route that has grown from one, by the cached view of its stream; that one itself if none has."""
        view = self._views.get(route.stream)
        if view is None or not route.topic or view.route.epoch <= route.epoch or route.epoch < view.history.first:
            return route
        has_grown = view.history.grown_from(route.epoch).epoch == view.route.epoch
        return view.route if has_grown and view.route.buffer_id == route.buffer_id else route

    def place_of_partition(self, stream: str, partition: int) -> Partition:
        """Return where the segment lies that a partition number names.

        Raises:
            InvalidRequestError, TruncatedError, StreamRecreatedError: see
                :func:`rollbridge.stream.routing.place_of_partition`.
            InvalidNameError, StreamNotFoundError, ZooKeeperUnavailableError.
        """
        view = self.view(stream)
        return place_of_partition(view.config.places, partition, view.history, lambda: self.read(stream).history)

    def has_lost(self, route: Route) -> bool:
        """Return True if the buffer of a route is gone, or about to be: its stream was deleted, or has another one."""
        try:
            now = self.view(route.stream).route
            return (now.buffer_topic, now.buffer_id) != (route.buffer_topic, route.buffer_id)
        except StreamNotFoundError:
            return True
        except RollbridgeError:
            return False  # it is not known now

    def forget(self, stream: str) -> None:
        """Drop the view of a stream, so that it is read again before its next use."""
        with self._lock:
            self._views.pop(self._adopted.pop(stream, stream), None)
            self.generation += 1

    def refresh(self) -> None:
        """Read again what may have changed. Called on the housekeeping thread."""
        while self._stale:
            stream = self._stale.pop()
            if stream not in self._views:
                continue
            try:
                self._read(stream)
            except StreamNotFoundError:
                self.forget(stream)
            except UnavailableError as fault:
                logger.info("stream.reread_failed stream=%s reason=%s", stream, fault)
                self._stale.add(stream)
                return

    def _read(self, stream: str) -> StreamView:
        name = StreamName.parse(stream)
        before = self._views.get(stream)
        config = self._metadata.stream(name)
        if config is not None:  # what an adopted topic takes may change, and which buffer a stream has
            config = self._metadata.stream(name, lambda: self._changed(stream))
        known = before.history if before is not None and before.config == config else None
        history = self._metadata.history(name, lambda: self._changed(stream), known)
        if known is not None and self._metadata.stream(name) != config:
            self.forget(stream)  # deleted and made again in between: nothing that was known holds
            return self._read(stream)
        if history is None or config is None or config.state is StreamState.DELETING:
            if name.scope not in self._metadata.scopes():
                raise StreamNotFoundError(
                    f"there is no scope {name.scope}; create a stream in it first; nothing was written",
                    code="scope-not-found",
                )
            raise StreamNotFoundError(f"stream {stream} does not exist; nothing was written")
        view = StreamView.of(config, history)
        with self._lock:
            if self._views.get(stream) != view:
                self._views[stream] = view
                self.generation += 1
        return view

    def _changed(self, stream: str) -> None:
        self._stale.add(stream)
        self._poke()
