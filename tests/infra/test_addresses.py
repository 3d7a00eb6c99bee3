"""Addresses of hosts, IPv6 among them."""

import socket

import pytest
from pydantic import ValidationError

from infra.machine import ports
from infra.settings import Settings, host_port, settings


def test_an_ipv6_address_stands_in_brackets_before_a_port() -> None:
    assert host_port("fd00::7", 8000) == "[fd00::7]:8000"
    assert host_port("10.0.0.7", 8000) == "10.0.0.7:8000"


@pytest.mark.parametrize(
    ("host", "own", "is_loopback"),
    [("::1", "::1", True), ("::", "::1", False), ("fd00::7", "fd00::7", False), ("0.0.0.0", "127.0.0.1", False)],
)
def test_a_host_may_be_an_ipv6_address(host: str, own: str, is_loopback: bool) -> None:
    made = Settings(host=host)
    assert (made.own_host, made.is_loopback) == (own, is_loopback)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.example:6379", "[fd00::1]:6379"])
def test_a_cluster_s_address_is_auto_or_a_host_with_a_port(address: str) -> None:
    assert Settings(cluster_address=address).cluster_address == address


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "fd00::1:6379", "ray://10.0.0.1:10001", "[fd00::1]", "autos", "10.0.0.1:65536", "10.0.0.1:0", ""]
)
def test_another_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(
        ValidationError, match=r"RATCHET_CLUSTER_ADDRESS '.*' is neither auto nor HOST:PORT: give .* 10.0.0.1:6379"
    ):
        Settings(cluster_address=address)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cluster_nodes": 2}, "RATCHET_CLUSTER_NODES 2 needs RATCHET_CLUSTER_ADDRESS"),
        ({"cluster_engine_nodes": 2}, "RATCHET_CLUSTER_ENGINE_NODES needs RATCHET_CLUSTER_ADDRESS"),
        ({"cluster_trusted_network": "fd00::/64"}, "RATCHET_CLUSTER_TRUSTED_NETWORK needs RATCHET_CLUSTER_ADDRESS"),
        (
            {"cluster_address": "auto", "cluster_trusted_network": "10.0.0.1/24"},
            "TRUSTED_NETWORK '10.0.0.1/24' is no network: .* fd00:1",
        ),
        (
            {"cluster_address": "auto", "cluster_engine_nodes": 2},
            "ENGINE_NODES 2 needs RATCHET_CLUSTER_TRUSTED_NETWORK: .* such as 10.0.0.0/24",
        ),
        (
            {"cluster_address": "auto", "cluster_nodes": 2, "cluster_engine_nodes": 4, "cluster_trusted_network": "10.0.0.0/24"},
            "RATCHET_CLUSTER_ENGINE_NODES 4 is more than RATCHET_CLUSTER_NODES 2",
        ),
        ({"cluster_address": "auto", "engine_gpus": (0,), "trainer_gpus": (1,)}, r"RATCHET_ENGINE_GPUS \[0\] .* leave both out"),
        ({"cluster_address": "auto", "engine_gpus": (0,), "trainer_gpus": (0,)}, r"RATCHET_ENGINE_GPUS \[0\] .* leave both out"),
    ],
)
def test_settings_that_do_not_go_with_a_cluster_are_one_line(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Settings(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["engine_gpus", "trainer_gpus"])
@pytest.mark.parametrize("gpus", [(0, 0), (1, -1)])
def test_a_gpu_that_is_named_twice_or_below_zero_is_refused(name: str, gpus: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=rf"RATCHET_{name.upper()} \[.*\]: give each GPU once, by its number from 0 on"):
        Settings(**{name: gpus})  # type: ignore[arg-type]


def test_a_list_that_is_no_json_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ENGINE_GPUS", "0,1")
    settings.cache_clear()
    with pytest.raises(ValueError, match=r"^RATCHET_ENGINE_GPUS is no list in JSON: give one such as \[0, 1\]$"):
        settings()


def test_a_taken_port_of_an_ipv6_address_is_skipped() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not ports.is_free(port, "::1")
        assert ports.free_port(port, "::1") > port


@pytest.mark.parametrize("url", ["https://me:word@bucket.s3.amazonaws.com/runs?key=word", "http://Bucket.s3.amazonaws.com/runs"])
def test_a_web_address_is_no_store(url: str) -> None:
    with pytest.raises(
        ValidationError, match=r"RATCHET_STORE_URL https?://bucket\.s3\.amazonaws\.com is a web address, .* give s3://"
    ) as error:
        Settings(store_url=url)
    assert "word" not in error.value.errors()[0]["msg"]
