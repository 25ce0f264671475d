"""A client of the router as a process of its own, for tests that kill it.

    python client_process.py ADDRESS MODEL TEXT MAX_TOKENS

Prints the kind of each step of the answer as it comes.
"""

import asyncio
import sys

from kvplane.common.v1 import prompt_pb2
from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_common.channels import dial


async def main(address: str, model: str, text: str, max_tokens: str) -> None:
    """Ask, and tell what comes."""
    request = router_pb2.GenerateRequest(
        model=model,
        prompt=prompt_pb2.Prompt(text=text),
        sampling=prompt_pb2.Sampling(max_tokens=int(max_tokens), temperature=0),
    )
    async with dial(address) as channel:
        async for step in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            sys.stdout.write(f"{step.WhichOneof('event')}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
