"""The last decisions and what came of them, for Explain."""

from collections import OrderedDict
from dataclasses import dataclass

from kvplane.common.v1 import generation_pb2
from kvplane_router.decide import Decision


@dataclass(slots=True)
class Told:
    """A decision and what came of it."""

    decision: Decision
    completion: generation_pb2.Completion | None = None
    error: str = ""


class History:
    """Remembers the last requests by id; one whose id comes again takes the older one's place."""

    def __init__(self, most: int = 1_000) -> None:
        self.most = most
        self._told: OrderedDict[str, Told] = OrderedDict()

    def decided(self, decision: Decision) -> None:
        """Remember a decision as the latest."""
        self._told[decision.request_id] = Told(decision)
        self._told.move_to_end(decision.request_id)
        if len(self._told) > self.most:
            self._told.popitem(last=False)

    def completed(self, request_id: str, completion: generation_pb2.Completion) -> None:
        """Note that a request ended well."""
        if request_id in self._told:
            self._told[request_id].completion = completion

    def failed(self, request_id: str, error: str) -> None:
        """Note how a request ended otherwise: status and message. A good end stays one."""
        told = self._told.get(request_id)
        if told is not None and told.completion is None:
            told.error = error

    def get(self, request_id: str) -> Told | None:
        """Return a request, or the latest one for an empty id; None if it is not remembered."""
        if request_id or not self._told:
            return self._told.get(request_id)
        return next(reversed(self._told.values()))
