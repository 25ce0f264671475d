"""What the node tells of itself, as messages."""

from google.protobuf.timestamp_pb2 import Timestamp

from kvplane.agent.v1 import agent_pb2
from kvplane.common.v1 import node_pb2, records_pb2
from kvplane_node_agent.admission import Lease
from kvplane_node_agent.ledger import Ledger
from kvplane_node_agent.memory import Memory
from kvplane_node_agent.residency import Residency
from kvplane_node_agent.served import ServedModel


def capacity_of(ledger: Ledger, engine: str, memory: Memory) -> node_pb2.Capacity:
    """Return what the node has; no models while it can serve none."""
    serving = ledger.engine_present and not ledger.stopping
    return node_pb2.Capacity(
        memory_source=memory.source,
        memory_total_bytes=memory.total_bytes,
        block_bytes=ledger.pool.block_bytes,
        total_blocks=ledger.pool.total,
        models=[_model(model, ledger.limits.queue_limit) for model in ledger.models if serving],
        engine=engine,
    )


def _model(model: ServedModel, queue_limit: int) -> node_pb2.Model:
    info, rates = model.info, model.rates
    return node_pb2.Model(
        name=info.name,
        loaded=info.loaded,
        generation=model.generation,
        slots=info.slots,
        queue_limit=queue_limit,
        context_tokens=info.context_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        load_ms=rates.load_ms,
        bytes_per_token=rates.bytes_per_token,
        service_ms=rates.service_ms,
    )


def load_of(ledger: Ledger) -> node_pb2.Load:
    """Return what the node is doing."""
    return node_pb2.Load(
        active_blocks=ledger.pool.active,
        resident_blocks=ledger.pool.resident,
        models=[
            node_pb2.ModelLoad(
                model=work.model,
                active=work.active,
                queued=work.queued,
                pending_prefill_tokens=work.pending_prefill_tokens,
            )
            for work in ledger.admission.work()
        ],
    )


def residency_of(residency: Residency, node_id: str) -> records_pb2.Residency:
    """Return a cached prompt as its record."""
    return records_pb2.Residency(
        node_id=node_id,
        model=residency.model,
        chain=residency.chain.to_proto(),
        tokens=residency.tokens,
        kv_bytes=residency.kv_bytes,
        blocks=residency.blocks,
        epoch=residency.epoch,
        generation=residency.generation,
        evidence=residency.evidence,
        create_time=timestamp(residency.create_ms),
        last_use_time=timestamp(residency.last_use_ms),
        hits=residency.hits,
    )


def admission_of(lease: Lease, queue_ms: float) -> agent_pb2.Admission:
    """Return what a request holds."""
    return agent_pb2.Admission(
        blocks=lease.blocks,
        evicted_blocks=lease.evicted_blocks,
        predicted_cached_tokens=lease.predicted_cached_tokens,
        queue_ms=queue_ms,
    )


def timestamp(wall_ms: int) -> Timestamp:
    """Return wall-clock milliseconds as a message."""
    message = Timestamp()
    message.FromMilliseconds(wall_ms)
    return message
