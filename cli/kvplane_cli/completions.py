"""What the engine measured of a request, as JSON."""

from collections.abc import Mapping
from typing import Any

from kvplane.common.v1 import generation_pb2
from kvplane_cli.render import kind_of, known


def completion_json(completion: generation_pb2.Completion) -> Mapping[str, Any]:
    """Return the end of an answer as a flat JSON object; what nobody measured is None."""
    usage, timings = completion.usage, completion.timings
    return {
        "finish_reason": kind_of(generation_pb2.FinishReason.DESCRIPTOR, completion.finish_reason),
        "prompt_tokens": known(usage, "prompt_tokens"),
        "cached_tokens": known(usage, "cached_tokens"),
        "evidence": kind_of(generation_pb2.Evidence.DESCRIPTOR, usage.evidence),
        "completion_tokens": known(usage, "completion_tokens"),
        **{field.name: known(timings, field.name) for field in timings.DESCRIPTOR.fields},
    }
