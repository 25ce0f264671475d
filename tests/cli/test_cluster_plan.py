import socket
from pathlib import Path

import pytest

from kvplane_cli.layout import Addresses, Embedded, Ports, Upstream, free_ports
from kvplane_cli.plan import plan
from kvplane_cli.shell import CliError

PORTS = Ports(router=1, registry=2, metastore=3, agents=(11, 12), engines=(21, 22))
ENGINES = (Embedded(Path("m.gguf"), "m", slots=2), Upstream("http://o"))


def test_a_process_starts_after_those_that_it_needs() -> None:
    waves = plan(ENGINES, PORTS, Path("data"), "ttft")
    assert [[planned.name for planned in wave] for wave in waves] == [
        ["metastore", "engine-1"],
        ["registry"],
        ["node-1", "node-2"],
        ["router"],
    ]


def test_an_agent_stands_in_front_of_its_engine() -> None:
    (*_, agents, _) = plan(ENGINES, PORTS, Path("data"), "ttft")
    first, second = agents
    assert "--engine-url=http://127.0.0.1:21" in first.command
    assert "--engine-url=http://o" in second.command


def test_the_context_given_is_that_of_one_slot() -> None:
    ((_, engine), *_) = plan(ENGINES, PORTS, Path("data"), "ttft")
    assert {"--slots=2", "--context=8192"} <= set(engine.command)


def test_the_documented_ports_follow_the_routers() -> None:
    addresses = Addresses.of(Ports.from_base(7700, 2))
    assert (addresses.router, addresses.metastore) == ("127.0.0.1:7700", "127.0.0.1:7702")
    assert addresses.agents == {"node-1": "127.0.0.1:7710", "node-2": "127.0.0.1:7711"}


def test_free_ports_are_all_different() -> None:
    ports = Ports.free(3)
    everything = {ports.router, ports.registry, ports.metastore, *ports.agents, *ports.engines}
    assert len(everything) == 9


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = Ports(port, free_ports(1)[0], free_ports(1)[0], agents=(), engines=())
        with pytest.raises(CliError, match=f"cannot listen on 127.0.0.1:{port}.*--port-base"):
            ports.check_free()
