"""Each service says what it serves, and that it can serve only when it can."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from harness.agents import running_agent
from harness.clusters import Cluster, fresh
from harness.engines import EngineProcess
from harness.services import InProcess, free_address, health, until
from kvplane_common.channels import dial
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve as serve_metastore
from kvplane_registry.config import RegistryConfig
from kvplane_registry.service import running as registry_running
from kvplane_router.config import RouterConfig
from kvplane_router.service import answering as router_answering

StartEngine = Callable[..., Awaitable[EngineProcess]]
SERVICES = {
    "metastore": "kvplane.metastore.v1.MetastoreService",
    "registry": "kvplane.registry.v1.RegistryService",
    "router": "kvplane.router.v1.RouterService",
    "agent": "kvplane.agent.v1.AgentService",
}


def addresses(cluster: Cluster) -> dict[str, str]:
    return {
        "metastore": cluster.metastore.address,
        "registry": cluster.registry.address,
        "router": cluster.router.address,
        "agent": cluster.agents["a"].address,
    }


async def reflected(address: str, **asked: str) -> reflection_pb2.ServerReflectionResponse:
    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(**asked)

    async with dial(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for response in stub.ServerReflectionInfo(requests()):
            return response
    raise AssertionError("reflection does not answer")


async def until_health(address: str, wanted: str, service: str = "") -> None:
    async def holds() -> bool:
        return await health(address, service) == wanted

    await until(holds)


@pytest.mark.parametrize("service", SERVICES)
async def test_reflection_lists_what_a_service_serves_and_describes_it(
    nano: Cluster, service: str
) -> None:
    address, name = addresses(nano)[service], SERVICES[service]
    listed = await reflected(address, list_services="")
    names = {one.name for one in listed.list_services_response.service}
    assert names >= {name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    described = await reflected(address, file_containing_symbol=name)
    assert described.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("service", SERVICES)
async def test_health_tells_of_the_service_by_its_name_and_of_the_whole(
    nano: Cluster, service: str
) -> None:
    address = addresses(nano)[service]
    assert await health(address, SERVICES[service]) == "SERVING"
    assert await health(address) == "SERVING"


@asynccontextmanager
async def metastore_at(address: str, data_dir: Path) -> AsyncIterator[None]:
    config = MetastoreConfig(listen=address, data_dir=data_dir, drain_s=0)
    async with InProcess(serve_metastore, config):
        yield


async def test_registry_and_router_serve_only_once_they_have_seen_the_metastore(
    tmp_path: Path,
) -> None:
    store, known = free_address(), free_address()
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(
            registry_running(RegistryConfig(listen=known, metastore=store, drain_s=0))
        )
        router, _ = await stack.enter_async_context(
            router_answering(
                RouterConfig(listen="127.0.0.1:0", metastore=store, registry=known, drain_s=0)
            )
        )
        for service, address in (("registry", registry.address), ("router", router.address)):
            assert await health(address) == "NOT_SERVING"
            assert await health(address, SERVICES[service]) == "NOT_SERVING"
        await stack.enter_async_context(metastore_at(store, tmp_path))
        for service, address in (("registry", registry.address), ("router", router.address)):
            await until_health(address, "SERVING")
            await until_health(address, "SERVING", SERVICES[service])


async def test_an_agent_serves_only_while_its_engine_answers(
    nano_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(nano_model)
    await engine.stop()
    async with running_agent(engine.url, engine.name, wait="NOT_SERVING") as agent:
        assert await health(agent.address, SERVICES["agent"]) == "NOT_SERVING"
        await engine.start()
        await until_health(agent.address, "SERVING")
        assert (await agent.generate(fresh(20))).text
        await engine.kill()
        await until_health(agent.address, "NOT_SERVING")
