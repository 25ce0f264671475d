"""Which texts are host:port."""

import pytest

from kvplane_common.addresses import check_address, with_port


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:7700", "box-3.rack:1", "localhost:65535", "[::1]:7700", "[fe80::1%eth0]:7700"],
)
def test_a_good_address_comes_back_as_it_is(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        pytest.param("", "is not host:port", id="nothing"),
        pytest.param("127.0.0.1", "is not host:port", id="no port"),
        pytest.param(":7700", "is not host:port", id="no host"),
        pytest.param("::1:7700", "is not host:port", id="IPv6 without brackets"),
        pytest.param("[::1:7700", "is not host:port", id="half a bracket"),
        pytest.param("http://box:7700", "is not host:port", id="a URL"),
        pytest.param("a b:7700", "is not host:port", id="a space"),
        pytest.param("box:7700\n", "has no port", id="a line end"),
        pytest.param("box:", "has no port from 1 to 65535", id="an empty port"),
        pytest.param("box:http", "has no port from 1 to 65535", id="a word for a port"),
        pytest.param("box:0", "has no port from 1 to 65535", id="port 0"),
        pytest.param("box:65536", "has no port from 1 to 65535", id="a port beyond the last"),
        pytest.param("box:+80", "has no port from 1 to 65535", id="a sign"),
        pytest.param("box:\u0667", "has no port from 1 to 65535", id="a digit of another script"),
        pytest.param("box:" + "1" * 5_000, "has no port from 1 to 65535", id="a huge port"),
    ],
)
def test_a_bad_address_is_refused_with_what_is_wrong(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_address(address)


def test_port_zero_is_good_to_listen_on() -> None:
    assert check_address("127.0.0.1:0", port_zero=True) == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("address", "replaced"), [("127.0.0.1:0", "127.0.0.1:7"), ("[::1]:0", "[::1]:7")]
)
def test_a_port_is_replaced(address: str, replaced: str) -> None:
    assert with_port(address, 7) == replaced
