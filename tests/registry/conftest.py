"""Registries with a real metastore behind them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.registry import LONG_S, SHORT_S, Cluster, cluster


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Leases outlive the test."""
    async with cluster(tmp_path, LONG_S) as running:
        yield running


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Leases end soon."""
    async with cluster(tmp_path, SHORT_S) as running:
        yield running
