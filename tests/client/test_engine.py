"""How an engine is called: by its configured id, and a tag that no other engine has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvcache_client.engines.vllm.early_start import _ours
from kvcache_client.engines.vllm.running_engine import engine_name, has_another, retire
from kvcache_client.settings import CONNECTOR
from kvcache_proto.types import MAX_NAME

ENDPOINT, OTHER = "ipc:///run/one/kvcache.sock", "ipc:///run/other/kvcache.sock"


def config(engine_id: str, instance: str | None, rank: int = 0) -> Any:
    parallel = SimpleNamespace(data_parallel_index=rank)
    transfer = SimpleNamespace(engine_id=engine_id)
    return SimpleNamespace(kv_transfer_config=transfer, instance_id=instance, parallel_config=parallel)


def test_engines_that_repeat_an_id_have_names_of_their_own_that_begin_with_it() -> None:
    names = [engine_name(config("prefill", instance)) for instance in ("1763798400123456789", "1763798400123456790")]
    assert len({*names}) == 2
    assert all(name.startswith("prefill-") and len(name) == len("prefill-") + 8 for name in names)
    assert engine_name(config("prefill", "1763798400123456789")) == names[0], "ranks and scheduler agree"
    assert engine_name(config("prefill", ""), "decode") == "decode", "an older vLLM has no instance id"
    assert len(engine_name(config("p" * 1000, "x"))) == MAX_NAME


def test_data_parallel_ranks_have_names_of_their_own() -> None:
    """Also in a MultiConnector, to whose connectors an operator may give an id, which all ranks have then."""
    names = {engine_name(config(f"prefill_dp{rank}", "one", rank), "decode") for rank in range(3)}
    assert len(names) == 3


class Connector:
    pass


def test_one_connector_a_side_of_an_engine_and_an_endpoint() -> None:
    first, second = Connector(), Connector()
    one, two = config("prefill", "one"), config("prefill", "two")
    assert not has_another(first, "scheduler", one, ENDPOINT)
    assert not has_another(first, "scheduler", one, ENDPOINT)
    assert has_another(second, "scheduler", one, ENDPOINT)
    for side, engine, endpoint in (("worker", one, ENDPOINT), ("scheduler", two, ENDPOINT), ("scheduler", one, OTHER)):
        assert not has_another(second, side, engine, endpoint)
    retire(first)
    assert not has_another(second, "scheduler", one, ENDPOINT)
    retire(second)
    dropped = has_another(Connector(), "scheduler", one, ENDPOINT)  # as an engine that goes without a shutdown
    assert (dropped, has_another(first, "scheduler", one, ENDPOINT)) == (False, False)
    retire(first)


def test_what_is_made_ready_early_bears_the_name_that_the_connector_will_have() -> None:
    inner = {"kv_connector": CONNECTOR, "engine_id": "decode", "kv_connector_extra_config": {"deadline_ms": 9}}
    other = {"kv_connector": "NixlConnector"}
    several = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [other, inner]})
    assert list(_ours(several)) == [({"deadline_ms": 9}, "decode")]
    assert list(_ours(SimpleNamespace(kv_connector=CONNECTOR, kv_connector_extra_config={}))) == [({}, "")]
