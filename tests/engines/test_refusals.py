"""What is passed on of an engine's errors, which may quote the prompt."""

import json
from collections.abc import Callable

import pytest

from kvplane_common.errors import KvplaneError
from kvplane_node_agent.engines import llama_wire, ollama_wire
from kvplane_node_agent.engines.refused import RefusedError

Refusal = Callable[[RefusedError], KvplaneError]
SECRET = "what somebody asked"


def body(error: object) -> bytes:
    return json.dumps({"error": error}).encode()


LLAMA = body({"code": 500, "type": "server_error", "message": SECRET})
BUSY = body(f"server busy: {SECRET}")
TOO_LONG = body(f"exceeds the context: {SECRET}")
NESTED = body(LLAMA.decode().replace("server_error", "exceed_context_size_error"))


@pytest.mark.parametrize(
    ("refusal", "error", "words"),
    [
        (llama_wire.refusal, RefusedError(500, LLAMA), "status 500, server_error"),
        (llama_wire.refusal, RefusedError(501, LLAMA), "status 501, server_error, 500"),
        (llama_wire.refusal, RefusedError(503, LLAMA), "not ready: status 503"),
        (llama_wire.refusal, RefusedError(401, LLAMA), "status 401"),
        (llama_wire.refusal, RefusedError(400, LLAMA, within_answer=True), "status 400"),
        (llama_wire.refusal, RefusedError(None, body(SECRET), within_answer=True), "an error"),
        (llama_wire.refusal, RefusedError(500, body({"type": SECRET})), "status 500"),
        (ollama_wire.refusal, RefusedError(500, body(SECRET)), "status 500"),
        (ollama_wire.refusal, RefusedError(503, BUSY), "status 503"),
        (ollama_wire.refusal, RefusedError(500, TOO_LONG), "status 500"),
        (ollama_wire.refusal, RefusedError(500, NESTED), "exceed_context_size_error"),
        (ollama_wire.refusal, RefusedError(None, TOO_LONG, within_answer=True), "an error"),
    ],
)
def test_no_error_of_the_engines_own_is_quoted(
    refusal: Refusal, error: RefusedError, words: str
) -> None:
    told = refusal(error)
    assert words in str(told)
    assert SECRET not in str(told) + str(told.facts)


@pytest.mark.parametrize("refusal", [llama_wire.refusal, ollama_wire.refusal])
def test_a_client_learns_what_was_wrong_with_its_own_request(refusal: Refusal) -> None:
    assert "top_k is odd" in str(refusal(RefusedError(400, body({"message": "top_k is odd"}))))
