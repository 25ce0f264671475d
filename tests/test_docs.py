"""The docs name what there is: every setting, every error reason, every sample."""

import re
from pathlib import Path

import pytest

from kvplane_common import errors
from kvplane_common.config import ServiceConfig, load
from kvplane_metastore.config import MetastoreConfig
from kvplane_node_agent.config import NodeAgentConfig
from kvplane_registry.config import RegistryConfig
from kvplane_router.config import RouterConfig

ROOT = Path(__file__).parent.parent
KINDS: dict[str, type[ServiceConfig]] = {
    "metastore": MetastoreConfig,
    "registry": RegistryConfig,
    "router": RouterConfig,
    "node-agent": NodeAgentConfig,
}


def _section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_has_its_line_and_its_default(name: str) -> None:
    page = (ROOT / "docs/configure.md").read_text()
    common, own = _section(page, "Every service"), _section(page, f"kvplane-{name}")
    for setting, field in KINDS[name].model_fields.items():
        section = common if setting in ServiceConfig.model_fields and setting != "listen" else own
        assert f"| `{setting}` |" in section
        if field.default not in (None, "") and isinstance(field.default, str | int | float | Path):
            assert f"| `{setting}` | `{field.default}` |" in section


@pytest.mark.parametrize("name", KINDS)
def test_a_setting_in_the_docs_exists(name: str) -> None:
    section = _section((ROOT / "docs/configure.md").read_text(), f"kvplane-{name}")
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) <= set(KINDS[name].model_fields)


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_of_the_configuration_loads(name: str) -> None:
    path = ROOT / f"deploy/config/{name}.toml"
    assert load(KINDS[name], f"kvplane-{name}", ["--config", str(path)]).config == path


def test_every_reason_for_a_refusal_is_explained() -> None:
    page = (ROOT / "docs/call-over-grpc.md").read_text()
    named = set(re.findall(r"`([A-Z_]{5,})`", page))
    wire = (ROOT / "protos/kvplane/router/v1/router.proto").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    reasons = {kind.reason for kind in kinds if issubclass(kind, errors.KvplaneError)}
    assert reasons & set(re.findall(r"[A-Z_]{5,}", wire)) <= named


def test_every_link_between_the_docs_leads_somewhere() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} -> {target}"
