"""The device mesh: what divides, what is refused."""

import jax
import jax.numpy as jnp
import pytest

from dpjax.engine import inputs

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


def test_one_device_is_no_mesh():
    assert inputs.agent_mesh(24, None) is None
    assert inputs.agent_mesh(24, 1) is None


def test_agents_are_spread():
    mesh = inputs.agent_mesh(24, 8)
    placed = inputs.place(jnp.zeros((2, 24, 3)), mesh, 1)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3, 3)}
    copied = inputs.place(jnp.zeros((2, 24, 3)), mesh, None)
    assert {shard.data.shape for shard in copied.addressable_shards} == {(2, 24, 3)}


def test_device_count_that_does_not_divide_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="does not divide the 20 agents; use one of 1, 2, 4, 5"):
        inputs.agent_mesh(20, 8)


@pytest.mark.parametrize("devices", [0, 9, -1, True])
def test_devices_that_are_not_there(devices):
    with pytest.raises(ValueError, match="devices is .*this process has 8"):
        inputs.agent_mesh(24, devices)
