"""What a model's speed is here, learned from what the engine reports. Unknown until measured."""

from dataclasses import dataclass

from kvplane_common.requests import MOST_BYTES_PER_TOKEN

_WEIGHT = 0.3
_LEAST_PREFILL_TOKENS = 32
_LEAST_DECODE_TOKENS = 4
_LEAST_SIZED_TOKENS = 128
_LEAST_BYTES_PER_TOKEN = 0.5
_LEAST_MS = 0.001


@dataclass(slots=True)
class Rates:
    """Moving averages in which a new sample weighs 0.3. None is a figure nobody has measured.

    Bytes and tokens are summed apart, so that a long prompt tells more than a short one.
    """

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    load_ms: float | None = None
    service_ms: float | None = None
    sized_bytes: float = 0.0
    sized_tokens: float = 0.0

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of prompt that make a token."""
        return self.sized_bytes / self.sized_tokens if self.sized_tokens else None

    def learn_prefill(self, uncached_tokens: int, prefill_ms: float) -> None:
        """Take the time in which `uncached_tokens` were evaluated; few tokens tell nothing."""
        if uncached_tokens >= _LEAST_PREFILL_TOKENS and prefill_ms >= _LEAST_MS:
            sample = uncached_tokens * 1000 / prefill_ms
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, sample)

    def learn_decode(self, completion_tokens: int, decode_ms: float) -> None:
        """Take the time in which one stream's answer was generated."""
        if completion_tokens >= _LEAST_DECODE_TOKENS and decode_ms >= _LEAST_MS:
            sample = completion_tokens * 1000 / decode_ms
            self.decode_tokens_per_s = _mean(self.decode_tokens_per_s, sample)

    def learn_bytes(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Take how many tokens the engine made of `prompt_bytes`.

        Few tokens are all template, and a ratio that no text has is a mistake.
        """
        if prompt_tokens < _LEAST_SIZED_TOKENS:
            return
        if _LEAST_BYTES_PER_TOKEN <= prompt_bytes / prompt_tokens <= MOST_BYTES_PER_TOKEN:
            self.sized_bytes = self.sized_bytes * (1 - _WEIGHT) + prompt_bytes
            self.sized_tokens = self.sized_tokens * (1 - _WEIGHT) + prompt_tokens

    def learn_load(self, load_ms: float) -> None:
        """Take the time that one load of the weights took."""
        self.load_ms = _mean(self.load_ms, load_ms)

    def learn_service(self, service_ms: float) -> None:
        """Take the time for which one request held its slot."""
        self.service_ms = _mean(self.service_ms, service_ms)


def _mean(before: float | None, sample: float) -> float:
    return sample if before is None else before + _WEIGHT * (sample - before)
