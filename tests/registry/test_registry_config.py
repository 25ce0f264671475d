"""What the registry can be told."""

import pytest

from kvplane_common.config import load
from kvplane_registry.config import RegistryConfig


def test_the_defaults_stay_on_loopback() -> None:
    config = load(RegistryConfig, "kvplane-registry", [])
    assert (config.listen, config.metastore) == ("127.0.0.1:7701", "127.0.0.1:7702")
    assert config.lease_s == 5.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--metastore", "7702"], "is not host:port", id="no address"),
        pytest.param(["--metastore", "127.0.0.1:0"], "no port", id="a metastore on port 0"),
        pytest.param(["--lease-s", "0.1"], "greater than or equal to 0.5", id="a lease too short"),
        pytest.param(["--lease-s", "inf"], "less than or equal to 3600", id="a lease for ever"),
    ],
)
def test_a_bad_setting_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit):
        load(RegistryConfig, "kvplane-registry", arguments)
    assert words in capsys.readouterr().err
