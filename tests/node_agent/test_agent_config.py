"""What the agent can be told, and what it refuses to be told."""

import pytest

from kvplane_common.config import load
from kvplane_common.node_ids import legal_node_id
from kvplane_node_agent.config import NodeAgentConfig

PROGRAM = "kvplane-node-agent"


def test_the_defaults_suit_one_machine() -> None:
    config = load(NodeAgentConfig, PROGRAM, [])
    assert (config.listen, config.registry, config.metastore) == (
        "127.0.0.1:7710", "127.0.0.1:7701", "127.0.0.1:7702",
    )  # fmt: skip
    assert (config.block_mb, config.kv_budget_mb, config.slots) == (16, None, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--node-id", "Big Box"], "1 to 63 characters"),
        (["--node-id", "n" * 64], "1 to 63 characters"),
        (["--registry", "nowhere"], "not host:port"),
        (["--advertise", "nowhere"], "not host:port"),
        (["--engine-url", "127.0.0.1:8080"], "http://"),
        (["--listen", "0.0.0.0:7710"], "advertise"),
        (["--block-mb", "0"], "--block-mb"),
        (["--kv-budget-mb", "-1"], "--kv-budget-mb"),
        (["--queue-limit", "-1"], "--queue-limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_refused_with_what_would_do(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(NodeAgentConfig, PROGRAM, flags)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_it_may_listen_everywhere_when_it_says_where_it_is_reached() -> None:
    flags = ["--listen", "0.0.0.0:7710", "--advertise", "10.0.0.5:7710"]
    assert load(NodeAgentConfig, PROGRAM, flags).advertise == "10.0.0.5:7710"


def test_labels_are_pairs() -> None:
    config = load(NodeAgentConfig, PROGRAM, ["--labels", "zone=a", "--labels", "gpu=h200"])
    assert config.labels == {"zone": "a", "gpu": "h200"}


def test_the_key_of_the_engine_is_not_shown() -> None:
    config = load(NodeAgentConfig, PROGRAM, ["--engine-api-key", "hush"])
    assert "hush" not in repr(config)
    assert config.engine_api_key.get_secret_value() == "hush"


@pytest.mark.parametrize(
    ("name", "node_id"),
    [("Box_1.lan", "box_1.lan"), ("büro pc", "b-ro-pc"), ("", "node"), ("a" * 70, "a" * 63)],
)
def test_a_hosts_name_is_made_a_legal_node_id(name: str, node_id: str) -> None:
    assert legal_node_id(name) == node_id
