"""What the node knows about each model that its engine serves."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvplane_node_agent.engines.base import EngineModel
from kvplane_node_agent.rates import Rates


@dataclass(slots=True)
class ServedModel:
    """One model: what the engine says of it, and what was learned."""

    info: EngineModel
    present: bool = True
    """False while the engine does not list it."""
    generation: int = 1
    """Counts the loads that are known of; only grows."""
    rates: Rates = field(default_factory=Rates)

    def kv_bytes(self, tokens: int) -> float | None:
        """Return the KV cache bytes of `tokens`; None if the geometry is unknown."""
        per_token = self.info.kv_bytes_per_token
        return None if per_token is None else tokens * per_token


class ServedModels:
    """The models of the node by name, those that went away included."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        """Yield the models that are there, by name."""
        return (model for _, model in sorted(self._models.items()) if model.present)

    def known(self) -> list[ServedModel]:
        """Return every model, those that went away included."""
        return list(self._models.values())

    def get(self, name: str) -> ServedModel | None:
        """Return a model that is there, or None."""
        model = self._models.get(name)
        return model if model is not None and model.present else None

    def names(self) -> list[str]:
        """Return the names of the models that are there, in order."""
        return [model.info.name for model in self]

    def update(self, infos: Iterable[EngineModel]) -> list[str]:
        """Take the engine's list; return the models whose cache is lost by what changed.

        A model that was unloaded, was loaded anew with another context or slot count, or is no
        longer listed has lost it; each of those begins a new generation.
        """
        listed = {info.name: info for info in infos}
        lost = [
            name
            for name, model in self._models.items()
            if model.present and _lost_cache(model.info, listed.get(name))
        ]
        for name in lost:
            self._models[name].generation += 1
        for name, model in self._models.items():
            model.present = name in listed
        for name, info in listed.items():
            self._models.setdefault(name, ServedModel(info)).info = info
        return lost

    def leave(self) -> None:
        """Take every model away: the engine is gone."""
        for model in self._models.values():
            model.present = False


def _lost_cache(before: EngineModel, now: EngineModel | None) -> bool:
    if now is None:
        return True
    if not before.loaded:
        return False
    shape = (before.context_tokens, before.slots)
    return not now.loaded or (now.context_tokens, now.slots) != shape
