from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from dev.cluster.sandbox import BLOCKS, Network, Sandbox, _free_block


def test_the_parts_of_a_network_are_apart_and_inside_it():
    network = Network(BLOCKS[0])
    link, pods, services = (IPv4Network(part) for part in ("10.200.0.0/30", network.pods, network.services))

    assert not link.overlaps(pods)
    assert not pods.overlaps(services)
    assert all(part.subnet_of(network.block) for part in (link, pods, services))
    assert {IPv4Address(network.host), IPv4Address(network.node)} == set(link.hosts())
    assert IPv4Address(network.service_address) == services[1]
    assert IPv4Address(network.dns) in services


def test_a_network_that_anything_uses_a_part_of_is_not_taken():
    used = [IPv4Network("10.200.77.0/24"), IPv4Network("10.201.0.0/16"), IPv4Network("10.202.3.4/32")]

    assert _free_block(used) == IPv4Network("10.203.0.0/16")


def test_no_free_network_is_an_error():
    with pytest.raises(RuntimeError, match="in use"):
        _free_block([IPv4Network("10.0.0.0/8")])


def test_two_clusters_have_links_of_different_names_that_fit():
    one, other = Sandbox(Path("/a/one")), Sandbox(Path("/a/other"))

    assert one.identity != other.identity
    assert max(len(one.identity), len(other.identity)) <= 15
