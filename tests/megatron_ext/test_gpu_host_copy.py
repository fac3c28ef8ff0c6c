"""Numbers on their way from a GPU to the host."""

import pytest
import torch

from mixtron.megatron_ext.host_copy import HostCopy

pytestmark = pytest.mark.gpu


def test_the_host_waits_for_nothing_that_came_after():
    x = torch.arange(3, device="cuda")
    copy, done = HostCopy(x), torch.cuda.Event()
    x += 1
    torch.cuda._sleep(10**9)
    done.record()
    assert copy.tolist() == [0, 1, 2]
    assert not done.query()
